"""The middleware in front of an app: what passes, what is changed, who may ask, and what comes back."""

from __future__ import annotations

import json
import re
from typing import Any

import anyio
import pytest
from support.asking import DOCUMENTS, MESSAGES
from support.vllm.front import REPORT, App

from kvmosaic.config import StoreConfig
from kvmosaic.errors import InvalidConfig, InvalidSeparator
from kvmosaic.vllm import ComposedDocuments
from kvmosaic.vllm.front.settings import FrontSettings
from kvmosaic.vllm.report import SHELF

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
DOCUMENTED = {"messages": MESSAGES, "documents": DOCUMENTS}


def events(client: Any, path: str, **body: Any) -> list[Any]:
    reply = client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    data = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


def test_a_request_without_documents_passes_byte_for_byte() -> None:
    app = App()
    client = app.client()
    body = b'{ "messages" :[],\n "kv_transfer_params": {"other": {"system": 1}}, "n": 1.0}'
    reply = client.post(CHAT, content=body)
    assert app.bodies == [body]
    assert reply.json()["kv_transfer_params"] == {"kvmosaic": REPORT}


def test_documents_become_token_ids_and_the_report_stands_beside_usage() -> None:
    app = App()
    reply = app.client().post(CHAT, json={**DOCUMENTED, "temperature": 0, "repair": "first(4)"}).json()
    assert set(app.body) == {"messages", "temperature", "kv_transfer_params"}
    assert app.body["kv_transfer_params"]["kvmosaic"]["repair"] == 4
    assert reply["kvmosaic"] == REPORT
    assert reply["kv_transfer_params"] is None
    details = {"cached_tokens": 13, "composed_tokens": 9, "recomputed_tokens": 5}
    assert reply["usage"] == {"prompt_tokens": 18, "prompt_tokens_details": details}


def test_params_of_others_stay_in_the_answer() -> None:
    app = App()
    client = app.client()
    app.report = None
    assert "kvmosaic" not in client.post(TEXT, json={"prompt": "x", "documents": ["y"]}).json()


def test_a_report_that_the_answer_does_not_carry_is_taken_from_the_shelf() -> None:
    app = App(report=None)
    SHELF.put("cmpl-7-0-0123abcd", REPORT)
    assert app.client().post(TEXT, json={"prompt": "x", "documents": ["y"]}).json()["kvmosaic"] == REPORT
    assert SHELF.take("cmpl-7-0") is None


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_the_last_chunk_of_a_stream_has_the_report(number: int, options: Any) -> None:
    SHELF.put("cmpl-7-0123abcd", REPORT)
    chunks = events(App().client(), CHAT, **DOCUMENTED, n=number, stream_options=options)
    assert [chunk.get("kvmosaic") for chunk in chunks] == [None] * (len(chunks) - 1) + [REPORT]
    assert len(chunks) == 2 * number + (options is not None)
    if options:
        assert chunks[-1]["usage"]["prompt_tokens_details"]["composed_tokens"] == 9


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_a_report_in_a_newer_vllms_chunks_is_told_once_and_not_raw(number: int, options: Any) -> None:
    chunks = events(App(has_own_chunks=True).client(), CHAT, **DOCUMENTED, n=number, stream_options=options)
    assert [chunk.get("kvmosaic") for chunk in chunks] == [None] * (len(chunks) - 1) + [REPORT]
    assert "kv_transfer_params" not in json.dumps(chunks)


def test_an_answer_that_carries_its_report_leaves_none_on_the_shelf() -> None:
    SHELF.put("cmpl-7-0123abcd", REPORT)
    assert App().client().post(CHAT, json=DOCUMENTED).json()["kvmosaic"] == REPORT
    assert SHELF.take("cmpl-7") is None


def test_a_report_that_comes_late_has_a_chunk_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def take(name: str) -> Any:
        asked.append(name)
        return REPORT if len(asked) > 4 else None

    monkeypatch.setattr(SHELF, "take", take)
    chunks = events(App().client(), CHAT, **DOCUMENTED)
    assert chunks[-1] == {"id": "cmpl-7", "object": "chunk", "created": 1, "model": "m", "choices": [],
                          "kvmosaic": REPORT}  # fmt: skip
    assert asked[0] == "cmpl-7"


def test_a_stream_without_a_report_is_as_it_came() -> None:
    app = App()
    client = app.client()
    with_documents = client.post(CHAT, json={**DOCUMENTED, "stream": True}).content
    assert with_documents == client.post(CHAT, json={"messages": MESSAGES, "stream": True}).content


def test_every_event_is_sent_at_once() -> None:
    """Parts of events wait for their end, and nothing else waits."""
    sent: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b'data: {"id":"a","choices"', b':[]}\n\ndata: {"b":1}\n\n', b"data: [DONE]\n\n"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            sent.append(b"|")
        await send({"type": "http.response.body", "body": b"rest"})

    async def check() -> None:
        outer = App()
        front = ComposedDocuments(app, FrontSettings.of())
        body = {"type": "http.request", "body": json.dumps(DOCUMENTED).encode()}
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "app": outer.app}

        async def receive() -> Any:
            return body

        async def send(message: Any) -> None:
            sent.append(message.get("body", b"start"))

        await front(scope, receive, send)

    anyio.run(check)
    assert sent == [
        b"start", b"", b"|", b'data: {"id":"a","choices":[]}\n\ndata: {"b":1}\n\n', b"|", b"data: [DONE]\n\n", b"|",
        b"rest",
    ]  # fmt: skip


def test_nothing_is_rendered_for_somebody_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    app = App()
    client = app.client()
    client.headers["Authorization"] = "Bearer guessed"
    monkeypatch.setattr(ComposedDocuments, "rewritten", None)
    reply = client.post(CHAT, json={**DOCUMENTED, "documents": [{"id": "unknown"}]})
    assert (reply.status_code, reply.json()) == (401, {"error": "Unauthorized"})
    assert client.put("/v1/documents/a", json={"text": "x"}).status_code == 401
    assert client.get("/v1/documents").status_code == 401


def test_what_is_wrong_is_told_in_the_form_of_openai() -> None:
    app = App()
    reply = app.client().post(CHAT, json={**DOCUMENTED, "documents": ["x", {"title": "y"}]})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "documents.1", None)
    assert not app.bodies


def test_repeats_and_blank_documents_are_left_out_with_a_warning() -> None:
    app = App()
    client = app.client()
    ferry = {"id": "m", "text": "The ferry goes to Oak Island."}
    reply = client.post(CHAT, json={**DOCUMENTED, "documents": [ferry, "", ferry]})
    assert reply.status_code == 200
    assert reply.headers["x-kvmosaic-warning"].endswith("documents read once, though sent again: documents.2 ('m')")
    once = client.post(CHAT, json={**DOCUMENTED, "documents": [ferry]})
    assert app.bodies[0] == app.bodies[1] and "x-kvmosaic-warning" not in once.headers
    assert client.post(CHAT, json={**DOCUMENTED, "documents": [""]}).status_code == 200
    assert json.loads(app.bodies[2]).keys() == DOCUMENTED.keys() - {"documents"}
    broken = client.post(CHAT, json={**DOCUMENTED, "documents": ["a\0"]})
    assert broken.status_code == 200 and "documents.0: 1 NUL" in broken.headers["x-kvmosaic-warning"]
    assert client.post(CHAT, json={"messages": MESSAGES, "user": "\0"}).status_code == 200, "vLLM decides"


def test_a_body_over_the_limit_is_refused() -> None:
    app = App()
    client = app.client(max_body_bytes=2_000)
    assert client.post(CHAT, json={"messages": MESSAGES}).status_code == 200
    reply = client.post(CHAT, json={"messages": [{"role": "user", "content": "x" * 2_000}]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    assert "2000 bytes" in reply.json()["error"]["message"]
    assert len(app.bodies) == 1
    assert client.put("/v1/documents/a", json={"text": "x" * 2_000}).status_code == 413


def test_before_the_model_is_there_documents_are_refused_and_the_rest_passes() -> None:
    app = App()
    client = app.client()
    del app.app.state.online_renderer
    assert client.post(CHAT, json=DOCUMENTED).status_code == 503
    assert client.post(CHAT, json={"messages": MESSAGES}).status_code == 200


def test_a_response_has_its_report_in_its_last_event() -> None:
    from kvmosaic.vllm.front.answers import StreamAnswer
    from kvmosaic.vllm.front.body_rewrite import Rewritten

    whole = {"type": "response.completed", "response": {"id": "r", "kv_transfer_params": {"kvmosaic": REPORT}}}
    answer = StreamAnswer({"type": "http.response.start"}, Rewritten(b"", 1, includes_usage=False), lambda name: None)
    text = f"event: response.completed\ndata: {json.dumps(whole)}\n\n"
    [_, part] = answer.messages({"body": text.encode(), "more_body": True})
    name, _, data = part["body"].decode().partition("\n")
    assert name == "event: response.completed"
    assert json.loads(data.removeprefix("data: "))["response"] == {
        "id": "r", "kv_transfer_params": None, "kvmosaic": REPORT,
    }  # fmt: skip


def test_the_environment_says_what_requests_leave_out() -> None:
    said = {
        "KVMOSAIC_CHUNK_SEPARATOR": "@@", "KVMOSAIC_REPAIR": "first(8)", "KVMOSAIC_POSITION_STRATEGY": "shared",
        "KVMOSAIC_DOCUMENT_TTL": "0", "KVMOSAIC_MAX_DOCUMENTS": "3", "KVMOSAIC_UNRELATED": "x",
        "CHUNK_SEPARATOR": "##", "MAX_DOCUMENTS": "4", "REPAIR": "full", "PREAMBLE": "another program's",
    }  # fmt: skip
    settings = FrontSettings.from_environment(said)
    assert settings.prompts.chunk_separator == "@@"
    assert (settings.how.repair, settings.how.position_strategy) == (8, "shared")
    assert (settings.store.document_ttl, settings.store.max_documents) == (None, 3)
    assert FrontSettings.from_environment({"KVMOSAIC_CHUNK_SEPARATOR": ""}).prompts.chunk_separator is None
    assert FrontSettings.of(chunk_separator="").prompts.chunk_separator is None
    assert FrontSettings.from_environment({}).store == StoreConfig(max_body_bytes=2**26)
    for name, value, told in [
        ("REPAIR", "8", "repair is '8'"),
        ("MAX_BODY_BYTES", "-1", "KVMOSAIC_MAX_BODY_BYTES is '-1'; give a whole number from 1024 to 1073741824"),
        ("MAX_DOCUMENTS", "9" * 19, "KVMOSAIC_MAX_DOCUMENTS is '999"),
        ("LONG_CHUNKS", "no", "KVMOSAIC_LONG_CHUNKS is 'no'; choose 'error' or"),
        ("CHUNK_SEPARATOR", " ", "separator"),
    ]:
        with pytest.raises((InvalidConfig, InvalidSeparator), match=re.escape(told)):
            FrontSettings.from_environment({f"KVMOSAIC_{name}": value})


def test_an_older_vllm_answers_conversations_on_completions() -> None:
    newer, older = App(), App(is_older=True)
    newer.client().post(CHAT, json=DOCUMENTED)
    client = older.client()
    reply = client.post(CHAT, json={**DOCUMENTED, "max_completion_tokens": 5, "temperature": 0}).json()
    assert older.token_ids == newer.token_ids
    assert set(older.body) == {"prompt", "max_tokens", "temperature", "kv_transfer_params"}
    assert older.body["max_tokens"] == 5
    assert older.body["kv_transfer_params"]["kvmosaic"] == newer.body["kv_transfer_params"]["kvmosaic"]
    assert reply["object"] == "chat.completion" and reply["kvmosaic"] == REPORT
    assert reply["choices"] == [
        {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": None,
         "message": {"role": "assistant", "content": " Oak"}},
    ]  # fmt: skip
    assert len(older.bodies) == 1
    client.post(CHAT, json=DOCUMENTED)
    assert older.body["max_tokens"] == 4096 - len(older.token_ids)


def test_an_older_vllm_streams_conversations() -> None:
    SHELF.put("cmpl-7-0-0123abcd", REPORT)
    chunks = events(App(is_older=True).client(), CHAT, **DOCUMENTED)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [chunk["choices"][0]["delta"]["role"] for chunk in chunks] == ["assistant", "assistant"]
    assert chunks[-1]["kvmosaic"] == REPORT and chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("fields", [{"tools": [{}]}, {"logprobs": True}, {"prompt_logprobs": 1}])
def test_what_an_older_vllm_cannot_do_with_documents_is_told(fields: dict[str, Any]) -> None:
    app = App(is_older=True)
    client = app.client()
    reply = client.post(CHAT, json={**DOCUMENTED, **fields})
    assert reply.status_code == 501 and next(iter(fields)) in reply.json()["error"]["message"]
    assert client.post(RESPONSE, json={"input": "x", "documents": ["y"]}).status_code == 501
    assert not app.bodies
    assert client.post(CHAT, json={"messages": MESSAGES, **fields}).status_code == 200


def test_an_older_vllm_checks_the_key_first() -> None:
    app = App(is_older=True)
    client = app.client()
    client.headers["Authorization"] = "Bearer guessed"
    assert client.post(CHAT, json=DOCUMENTED).status_code == 401
    assert not app.bodies


def test_fields_that_are_ours_do_not_reach_a_route_of_another_name() -> None:
    app = App()
    client = app.client()
    assert client.get("/v1/models").status_code == 200
    assert client.post("/v1/embeddings", json={"documents": ["x"]}).status_code == 404


def test_preflights_are_answered_by_vllm() -> None:
    app = App()
    reply = app.client().options("/v1/documents", headers={"Origin": "https://somewhere"})
    assert reply.status_code == 404 and "error" not in reply.text
