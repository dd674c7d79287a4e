"""Answers without end by HTTP: the same fields on each route, with bounds that are told."""

from __future__ import annotations

from dataclasses import replace

import httpx
import pytest
from support.asking import DOCUMENTS, GREEDY, MESSAGES, chat, post, refused, streamed_chat, text_of

from kvmosaic import SamplingParams
from kvmosaic.server.generation.sampling_fields import prepared

PROMPT = "The ferry goes to Oak Island."
WINDOW = {"window_tokens": 24, "sink_tokens": 2}


def test_all_routes_answer_alike_with_a_window(http: httpx.Client, server) -> None:
    fields = {**GREEDY, "max_tokens": 60}
    completion = post(http, "/v1/completions", prompt=PROMPT, **fields, **WINDOW)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, **WINDOW)

    async def answer() -> str:
        deltas = [delta async for delta in server.services.engine.generate(server.llm.encoder.encode(PROMPT), params)]
        return "".join(answer.text for delta in deltas for answer in delta.answers)

    assert completion["choices"][0]["text"] == server.call(answer)
    whole = chat(http, **fields, **WINDOW, documents=DOCUMENTS)
    events = streamed_chat(http, **fields, **WINDOW, documents=DOCUMENTS)
    assert text_of(events) == whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] == 60


def test_a_prompt_may_be_longer_than_the_model(http: httpx.Client) -> None:
    many = [7] * 6_000
    error = refused(http, "/v1/completions", prompt=many, max_tokens=2)
    assert "6000 tokens" in error["message"]
    reply = post(http, "/v1/completions", prompt=many, max_tokens=2, ignore_eos=True, **WINDOW)
    assert reply["usage"]["prompt_tokens"] == 6_000 and reply["usage"]["completion_tokens"] == 2


def test_a_conversation_may_be_longer_than_the_model(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "The ferry goes to Oak Island. " * 1_000}]
    assert refused(http, "/v1/chat/completions", messages=messages, max_tokens=2)["status"] == 400
    reply = chat(http, messages=messages, max_tokens=2, **WINDOW)
    assert reply["usage"]["prompt_tokens"] > 5_000 and reply["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"window_tokens": 0}, "greater than or equal to 1"),
        ({"window_tokens": "many"}, "valid integer"),
        ({"sink_tokens": 4}, "there is no window_tokens"),
        ({"window_tokens": 2**20}, "positions and the model has"),
        ({"window_tokens": 16, "max_tokens": 2**21}, "at most 1048576 tokens"),
    ],
)
def test_what_cannot_work_is_refused_with_its_reason(http: httpx.Client, fields: dict[str, object], told: str) -> None:
    for path, question in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        error = refused(http, path, **question, **fields)
        assert error["status"] == 400 and told in error["message"]


def test_who_does_not_say_how_long_gets_no_more_than_the_model_has_positions(http: httpx.Client, server) -> None:
    params = SamplingParams(window_tokens=24, max_tokens=None)
    assert prepared(server.llm, params).max_tokens == server.llm.engine.max_positions
    assert prepared(server.llm, replace(params, max_tokens=2**20)).max_tokens == 2**20
    assert prepared(server.llm, SamplingParams(max_tokens=None)).max_tokens is None


def test_the_schema_names_the_fields(http: httpx.Client) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest", "ResponseRequest"):
        assert {"window_tokens", "sink_tokens"} <= set(schemas[name]["properties"])
