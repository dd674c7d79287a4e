"""vLLM's own features with documents in several orders: speculation, shaped answers, tools, adapters, compilation."""

from __future__ import annotations

import json
import re
from itertools import permutations
from typing import Any

import pytest
from support.asking import MESSAGES
from support.messages import document, user
from support.vllm import features
from support.vllm.asking import compose, difference, documents
from support.vllm.features import SHAPES, TEXTS, make_adapter
from support.vllm.serving import COMPOSING, ForkedServer

ORDERS = list(permutations(TEXTS))[::2]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
TIGHT = {"disable_any_whitespace": True}
"""A random model might write spaces without end; outlines allows one at most."""
LOOK = {"name": "look", "parameters": SHAPES["json"]}
FIND = {"name": "find", "parameters": SHAPES["json"]}
TOOLS = [{"type": "function", "function": {**function, "strict": True}} for function in (LOOK, FIND)]
SHAPING = f"--structured-outputs-config={json.dumps({'backend': 'xgrammar', **TIGHT})}"
SHOWING = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.fixture(scope="module")
def server(vllm_model, tmp_path_factory):
    """Everything at once: n-gram speculation, tools, shaped answers."""
    model = vllm_model("llama")
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(SHOWING + (model / "chat_template.jinja").read_text())
    flags = ("--enable-auto-tool-choice", "--tool-call-parser=hermes", f"--chat-template={template}")
    server = ForkedServer(model, *COMPOSING, *flags, f"--speculative-config={json.dumps(NGRAM)}", SHAPING)
    yield server
    server.stop()


def ask(server: ForkedServer, order: Any, **body: Any) -> dict[str, Any]:
    """The first choice of an answer that was composed of documents in this order."""
    asked = {"model": "small", "messages": MESSAGES, "temperature": 0, "max_tokens": 48, "documents": list(order)}
    reply = server.http.post("/v1/chat/completions", json={**asked, "repair": "none", **body})
    assert reply.status_code == 200, reply.text
    read = reply.json()
    assert read["kvmosaic"]["bypass"] is None and len(read["kvmosaic"]["documents"]) == len(order), read
    choice: dict[str, Any] = read["choices"][0]
    return choice


def is_shaped(kind: str, text: str) -> bool:
    if kind == "json":
        return isinstance(json.loads(text)["open"], bool)
    return text in SHAPES["choice"] if kind == "choice" else re.fullmatch(SHAPES["regex"], text) is not None


def test_speculation_changes_no_answer(vllm_engine):
    system, *chunks, question = documents(80, 40, 70, 65, 90, 19)
    question += chunks[0][:30] * 2  # what n-grams are found in
    plain, guessing = vllm_engine("llama"), vllm_engine("llama", speculative_config=NGRAM)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2]):
        asked = compose(system, [chunks[index] for index in order], question, repair=0)
        one, other = (engine.ask(asked, max_tokens=24) for engine in (plain, guessing))
        assert one.is_composed and other.is_composed
        assert other.tokens == one.tokens and difference(one, other) < 1e-4


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
def test_answers_have_the_shape_that_was_asked_for(vllm_engine, backend):
    engine = vllm_engine(
        "llama", structured_outputs_config={"backend": backend, **(TIGHT if backend != "outlines" else {})}
    )
    for kind, order in zip(SHAPES, ORDERS, strict=True):
        text, report = engine.call(features.constrained, kind=kind, documents=list(order))
        assert is_shaped(kind, text), text
        assert report["bypass"] is None


@pytest.mark.parametrize("kind", SHAPES)
def test_shaped_answers_of_a_server_that_speculates(server, kind):
    for order in ORDERS:
        assert is_shaped(kind, ask(server, order, structured_outputs={kind: SHAPES[kind]})["message"]["content"])


def test_a_json_schema_of_openais_clients(server):
    shape = {"type": "json_schema", "json_schema": {"name": "open", "schema": SHAPES["json"]}}
    for order in ORDERS:
        assert is_shaped("json", ask(server, order, response_format=shape)["message"]["content"])


def called(message: dict[str, Any]) -> set[str]:
    """Names of called tools; a random model may end in the middle of a call, whose text vLLM then leaves as it is."""
    begun = re.findall(r'^<tool_call>\n{"name": "(\w+)", "arguments": {', message["content"] or "")
    return {*begun, *(call["function"]["name"] for call in message.get("tool_calls") or ())}


def test_named_and_required_tools_are_called(server):
    named = {"type": "function", "function": {"name": "look"}}
    for order in ORDERS:
        assert called(ask(server, order, tools=TOOLS, tool_choice=named)["message"]) == {"look"}
        assert {"look", "find"} >= called(ask(server, order, tools=TOOLS, tool_choice="required")["message"]) > set()
        assert ask(server, order, tools=TOOLS)["finish_reason"] in ("length", "stop")


def test_documents_of_an_adapter_are_its_own(vllm_engine, vllm_model, tmp_path):
    adapter = str(make_adapter(vllm_model("llama"), tmp_path / "adapter"))
    engine = vllm_engine("llama", enable_lora=True, max_lora_rank=8)
    for order in ORDERS:
        plain, _ = engine.call(features.adapted, adapter=None, documents=list(order))
        tokens, report = engine.call(features.adapted, adapter=adapter, documents=list(order))
        fresh, computed = engine.call(features.adapted, adapter=adapter, documents=list(order), salt="fresh" + order[0])
        assert report["bypass"] is None and tokens == fresh and tokens != plain
        assert computed["totals"]["cached_tokens"] < report["totals"]["cached_tokens"] or order is ORDERS[0]


def test_blocks_of_another_api_are_refused_where_documents_are_composed(server):
    block = document(TEXTS[0])
    for path, body in {
        "/v1/chat/completions": {"messages": [user(block, {"type": "text", "text": "What?"})]},
        "/v1/responses": {"input": [user(block, {"type": "input_text", "text": "What?"})]},
    }.items():
        for more in ({}, {"documents": [TEXTS[1]]}):
            reply = server.http.post(path, json={"model": "small", **body, **more})
            assert reply.status_code == 400, (path, more, reply.text)


def test_a_compiled_model_answers_as_one_that_is_not(vllm_engine):
    """The one test with inductor, whose compilation takes longer than all else here."""
    system, *chunks, question = documents(81, 40, 70, 65, 90, 19)
    fresh = {"VLLM_DISABLE_COMPILE_CACHE": "1"}
    compiled = vllm_engine("llama", enforce_eager=False, max_model_len=512, environment=fresh)
    plain = vllm_engine("llama")
    for order in ([0, 1, 2], [2, 0, 1], [1, 2]):
        for how in ({"repair": 8}, {"repair": 0, "position_strategy": "shared"}):
            asked = compose(system, [chunks[index] for index in order], question, **how)
            one, other = compiled.ask(asked), plain.ask(asked)
            assert one.is_composed and one.num_cached_tokens == other.num_cached_tokens
            assert one.tokens == other.tokens and difference(one, other) < 1e-4
