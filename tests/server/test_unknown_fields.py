"""Unknown fields of requests: ignored with a warning, refused if they look like one that matters, or with --strict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from jsonschema import Draft202012Validator
from support.server import RunningServer

from kvmosaic.web.json_body import MAX_UNKNOWN

MESSAGES = [{"role": "user", "content": "Where does the ferry go?"}]
CHAT = "/v1/chat/completions"
ROUTES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "Where?", "max_tokens": 2},
    "/v1/responses": {"input": "Where?", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2, "model": "reader"},
    "/v1/messages/count_tokens": {"messages": MESSAGES, "model": "reader"},
    "/tokenize": {"prompt": "Where?"},
}


@pytest.fixture(scope="module")
def tolerant() -> Iterator[RunningServer]:
    with RunningServer() as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    with RunningServer(strict=True) as server:
        yield server


def ask(server: RunningServer, path: str = CHAT, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + path, json={**ROUTES[path], **fields}, timeout=60)


@pytest.mark.parametrize("path", ROUTES)
def test_unknown_field_is_ignored_with_a_warning(tolerant: RunningServer, path: str) -> None:
    reply = ask(tolerant, path, mirostat_tau=5, provider={"order": ["x"]})
    assert reply.status_code == 200, reply.text
    warnings = ["unknown field 'mirostat_tau' was ignored", "unknown field 'provider' was ignored"]
    assert reply.headers["x-kvmosaic-warning"] == "; ".join(warnings)
    if "kvmosaic" in reply.json():
        assert reply.json()["kvmosaic"]["warnings"] == warnings
    known = ask(tolerant, path)
    assert "x-kvmosaic-warning" not in known.headers
    if "kvmosaic" in known.json():
        assert known.json()["kvmosaic"]["warnings"] == []


@pytest.mark.parametrize(
    "path", [CHAT, *(pytest.param(each, marks=pytest.mark.slow) for each in ROUTES if each != CHAT)]
)
def test_any_model_name_is_answered_unless_names_are_strict(
    tolerant: RunningServer, strict: RunningServer, path: str
) -> None:
    reply = ask(tolerant, path, model="gpt-4")
    assert reply.status_code == 200, reply.text
    warning = f"the model 'gpt-4' is not served here; {tolerant.model!r} answered"
    assert reply.headers["x-kvmosaic-warning"] == warning
    if "kvmosaic" in reply.json():
        assert (reply.json()["model"], reply.json()["kvmosaic"]["warnings"]) == (tolerant.model, [warning])
    assert "x-kvmosaic-warning" not in ask(tolerant, path, model=tolerant.model).headers
    refused = ask(strict, path, model="gpt-4")
    assert refused.status_code == 404 and tolerant.model in refused.json()["error"]["message"]


@pytest.mark.slow
def test_names_may_be_strict_on_their_own() -> None:
    with RunningServer(strict_model_names=True) as server:
        error = ask(server, mirostat=1, model="gpt-4").json()["error"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert ask(server, mirostat=1).status_code == 200


LIMITS = [(path, name) for path, body in ROUTES.items() for name in body if "max" in name and path != CHAT]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in LIMITS),
    ],
)
def test_minus_one_and_empty_stop_texts_are_no_limit(tolerant: RunningServer, path: str, name: str) -> None:
    stop = "stop_sequences" if path == "/v1/messages" else "stop"
    reply = ask(tolerant, path, **{name: -1, stop: ["", *" aeo\n1"], "min_tokens": 17})
    assert reply.status_code == 200, reply.text
    usage = reply.json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) >= 17
    error = ask(tolerant, path, **{name: -2}).json()["error"]
    assert f"{name}: must be greater than or equal to {'-' * (path == '/v1/completions')}1" in error["message"]


ANTHROPIC = "/v1/messages"
CITED = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "The mill is red."}}
CITED |= {"citations": {"enabled": True}}
NEEDLESS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        CHAT,
        {"reasoning_effort": "high", "verbosity": "low", "stop": [""]},
        ["'reasoning_effort' was ignored: use chat_template_kwargs", "'verbosity' was ignored: say it in the system"],
    ),
    (
        "/v1/responses",
        {"text": {"verbosity": "low"}, "reasoning": {"effort": "low"}, "truncation": "auto"},
        ["'text.verbosity' was ignored: say", "'reasoning' was ignored: use", "'truncation' was ignored: prompts are"],
    ),
    (
        "/v1/responses",
        {
            "include": ["file_search_call.results", "reasoning.encrypted_content", "web_search_call.action.sources"],
            "tools": [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "web_search"}],
            "input": [
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                {"role": "user", "content": "Where?", "style": 1},
                {"type": "reasoning", "summary": [], "content": None},
            ],
        },
        [
            "unknown field 'input.*.style' was ignored",
            "'input.*' was ignored: reasoning without a text",
            "'include.*' was ignored: there is nothing",
            "'tools.*' was ignored: tools of type 'web_search' cannot",
            "'tools.*' was ignored: tools of type 'custom' cannot",
        ],
    ),
    (
        ANTHROPIC,
        {
            "messages": [{"role": "user", "content": [CITED, {"type": "text", "text": "What is red?"}]}],
            "context_management": {"edits": []},
            "thinking": {"type": "adaptive"},
        },
        [
            "'messages.*.content.*.citations' was ignored: answers do not cite",
            "'context_management' was ignored: prompts are never cut",
            "'thinking' was ignored: this model's chat template cannot",
        ],
    ),
]


def test_fields_without_which_the_answer_is_right_are_ignored_with_their_reasons(tolerant: RunningServer) -> None:
    for path, fields, warnings in NEEDLESS:
        reply = ask(tolerant, path, **fields)
        assert reply.status_code == 200, reply.text
        told = reply.json()["kvmosaic"]["warnings"]
        assert all(said.startswith(warning) for said, warning in zip(told, warnings, strict=True)), told
        assert reply.headers["x-kvmosaic-warning"].startswith(warnings[0])


def test_a_strict_server_refuses_fields_that_it_does_not_support(strict: RunningServer) -> None:
    reply = ask(strict, reasoning_effort="high")
    assert reply.status_code == 400 and "not supported: use chat_template_kwargs" in reply.text
    reply = ask(strict, "/v1/responses", tools=[{"type": "web_search"}])
    assert reply.json()["error"]["param"] == "tools.0" and "only functions; leave it out" in reply.text


def test_empty_turns_before_the_last_one_are_read(tolerant: RunningServer) -> None:
    contents: list[Any] = ["", None, [], " "]
    turns = [turn for content in contents for turn in (*MESSAGES, {"role": "assistant", "content": content})]
    turns += [*MESSAGES, {"role": "assistant"}, {"role": "user", "content": ""}]
    reply = ask(tolerant, messages=[{"role": "system", "content": ""}, *turns, *MESSAGES])
    assert reply.status_code == 200, reply.text
    empty = [*MESSAGES, {"role": "assistant", "content": []}, *MESSAGES]
    assert ask(tolerant, ANTHROPIC, messages=empty).status_code == 200
    error = ask(tolerant, messages=[*MESSAGES, {"role": "user", "content": " "}]).json()["error"]
    assert error["message"] == "message 1 (user), the last one, has no content; write something"


def test_same_field_in_many_places_is_one_warning(tolerant: RunningServer) -> None:
    documents = [{"id": f"d{index}", "text": "The ferry goes to Oak Island.", "score": 0.5} for index in range(200)]
    messages = [{"role": "user", "content": [{"type": "text", "text": "Where?", "style": 1}]}]
    reply = ask(tolerant, documents=documents[:3], messages=messages).json()
    assert reply["kvmosaic"]["warnings"] == [
        "unknown field 'messages.*.content.*.style' was ignored",
        "unknown field 'documents.*.score' was ignored",
    ]
    assert len(reply["kvmosaic"]["documents"]) == 3
    counted = httpx.post(tolerant.url + "/tokenize", json={"messages": messages, "documents": documents}).json()
    assert counted["count"] > 1_000


def test_long_body_is_read_in_the_same_way(tolerant: RunningServer) -> None:
    long = {"user": "x" * 2**17}
    reply = ask(tolerant, **long, mirostat=1)
    assert reply.json()["kvmosaic"]["warnings"] == ["unknown field 'mirostat' was ignored"]
    reply = ask(tolerant, **long, cache_sal="x")
    assert reply.status_code == 400 and "did you mean 'cache_salt'?" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "meant"),
    [
        ({"document": [{"text": "x"}]}, "document", "documents"),
        ({"docs": ["x"]}, "docs", "documents"),
        ({"cacheSalt": "x"}, "cacheSalt", "cache_salt"),
        ({"salt": "x"}, "salt", "cache_salt"),
        ({"chunk_contxt": "none"}, "chunk_contxt", "chunk_context"),
        ({"temprature": 0}, "temprature", "temperature"),
        ({"tool_choise": "none"}, "tool_choise", "tool_choice"),
        ({"documents": [{"title": "x", "page_content": "y"}]}, "documents.0.page_content", "text"),
        ({"documents": ["a", {"id": "x", "Text": "y"}]}, "documents.1.Text", "text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cachecontrol": {}}]}]},
            "messages.0.content.0.cachecontrol",
            "cache_control",
        ),
    ],
)
def test_mistyped_field_that_matters_is_refused(
    tolerant: RunningServer, fields: dict[str, Any], param: str, meant: str
) -> None:
    reply = ask(tolerant, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert error["message"] == f"unknown field {param!r}; did you mean {meant!r}?"


@pytest.mark.parametrize(
    "name", ["max_tool_calls_", "repeat_penalty", "guided_json", "stream_tools", "top_a", "models"]
)
def test_field_of_another_server_is_not_taken_for_one_of_ours(tolerant: RunningServer, name: str) -> None:
    assert ask(tolerant, **{name: 1}).status_code == 200


def test_other_faults_are_still_refused_and_by_their_own_name(tolerant: RunningServer) -> None:
    error = ask(tolerant, mirostat=1, max_tokens="x").json()["error"]
    assert error["param"] == "max_tokens"
    assert ask(tolerant, mirostat=1, messages="x").json()["error"]["param"] == "messages"


def test_number_of_unknown_fields_and_the_length_of_their_names_are_bounded(tolerant: RunningServer) -> None:
    many = {f"own{index}": 1 for index in range(MAX_UNKNOWN)}
    reply = ask(tolerant, **many)
    assert reply.status_code == 200 and len(reply.headers["x-kvmosaic-warning"]) == 2_000
    reply = ask(tolerant, **many, one_more=1)
    assert reply.status_code == 400 and "more than 64 different unknown fields" in reply.json()["error"]["message"]
    reply = ask(tolerant, **{"x" * 10_000: 1, "line\nfeed é": 2})
    assert reply.status_code == 200
    assert "x" * 65 not in reply.text and "line\\\\nfeed \\xe9" in reply.headers["x-kvmosaic-warning"]


def test_stream_warns_in_its_last_chunk(tolerant: RunningServer) -> None:
    reply = ask(tolerant, stream=True, mirostat=1)
    assert "mirostat" in reply.headers["x-kvmosaic-warning"]
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert chunks[-1]["kvmosaic"]["warnings"] == ["unknown field 'mirostat' was ignored"]


def test_real_clients_with_fields_of_other_servers_are_answered(tolerant: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{tolerant.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model=tolerant.model, messages=MESSAGES, max_tokens=2, extra_body={"route": "fallback"}
        )
        assert answer.kvmosaic["warnings"] == ["unknown field 'route' was ignored"]
    with anthropic.Anthropic(base_url=tolerant.url, api_key="none") as other:
        message = other.messages.create(
            model=tolerant.model, messages=MESSAGES, max_tokens=2, extra_body={"context_edit": {}}
        )
        assert message.kvmosaic["warnings"] == ["unknown field 'context_edit' was ignored"]


def test_strict_server_and_the_document_store_refuse_unknown_fields(tolerant: RunningServer) -> None:
    stored = httpx.post(tolerant.url + "/v1/documents", json={"text": "x", "mirostat": 1})
    assert stored.status_code == 400 and stored.json()["error"]["param"] == "mirostat"
    with RunningServer(strict=True) as strict:
        for path in ROUTES:
            reply = ask(strict, path, mirostat=1)
            assert reply.status_code == 400 and "mirostat" in reply.text


@pytest.mark.parametrize("path", ROUTES)
def test_document_of_the_api_allows_what_is_ignored_and_nothing_else(
    tolerant: RunningServer, strict: RunningServer, path: str
) -> None:
    part = {"id": "ferry", "text": "The ferry goes to Oak Island.", "score": 0.5}
    unknown = {**ROUTES[path], "mirostat_tau": 5, "documents": [part]}
    assert is_declared(tolerant, path, unknown)
    assert ask(tolerant, path, **unknown).status_code == 200
    assert not is_declared(tolerant, path, {**unknown, "documents": 5}), "known fields keep their types"
    assert not is_declared(strict, path, {**ROUTES[path], "mirostat_tau": 5})
    assert not is_declared(strict, path, {**ROUTES[path], "documents": [part]})
    assert is_declared(strict, path, ROUTES[path])


def test_routes_that_refuse_unknown_fields_say_so(tolerant: RunningServer) -> None:
    warm, part = "/v1/documents:warm", {"id": "ferry", "text": "The ferry goes to Oak Island."}
    assert is_declared(tolerant, warm, {"documents": [part]})
    for unknown in ({"documents": [{**part, "score": 0.5}]}, {"documents": [part], "idz": []}):
        assert not is_declared(tolerant, warm, unknown)
        assert httpx.post(tolerant.url + warm, json=unknown, timeout=60).status_code == 400


def is_declared(server: RunningServer, path: str, body: dict[str, Any]) -> bool:
    """Whether a body fits its schema in the OpenAPI document."""
    api = httpx.get(server.url + "/openapi.json", timeout=60).json()
    schema = api["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return bool(Draft202012Validator({**schema, "components": api["components"]}).is_valid(body))
