"""Two API servers in front of two engines, without statistics: every answer has its report, and no raw field."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import httpx
import pytest
from support.asking import MESSAGES
from support.vllm.serving import COMPOSING, ForkedServer

TEXTS = ["The mill was built in 1907.", "The ferry goes to Oak Island.", "Trout live in the upper lake."]
ASKED = {"model": "small", "messages": MESSAGES, "temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(vllm_model):
    several = ("--api-server-count=2", "--data-parallel-size=2", "--disable-log-stats")
    server = ForkedServer(vllm_model("llama"), *COMPOSING, *several)
    yield server
    server.stop()


def ask(server: ForkedServer, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    """A reply over a connection of its own, so that any of the API servers answers."""
    with server.client() as client:
        reply = client.post(path, json={**ASKED, **body})
    assert reply.status_code == 200, reply.text
    return reply


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


def test_every_stream_ends_with_its_report(server):
    ways = [
        {},
        {"n": 2, "temperature": 1.0},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ]
    asked = [
        {"documents": list(order), "stream": True, **ways[number % 4]}
        for number, order in enumerate(list(permutations(TEXTS)) * 4)
    ]
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda body: chunks(ask(server, **body)), asked))
    for told in replies:
        assert "kv_transfer_params" not in json.dumps(told)
        assert [len(chunk["kvmosaic"]["documents"]) for chunk in told if "kvmosaic" in chunk] == [3]
        assert "kvmosaic" in told[-1], "in the last chunk, not in one of its own"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_ends_at_a_stop_string_has_its_report(server, stream):
    for documents in permutations(TEXTS, 2):
        whole = ask(server, documents=documents, repair="none").json()["choices"][0]["message"]["content"]
        reply = ask(server, documents=documents, repair="none", stop=[whole[2:4]], stream=stream)
        last = chunks(reply)[-1] if stream else reply.json()
        assert last["choices"][0]["finish_reason"] == "stop"
        assert not last["kvmosaic"]["bypass"] and len(last["kvmosaic"]["documents"]) == 2


def test_texts_and_responses_have_it_too(server):
    for documents in permutations(TEXTS, 2):
        text = {"prompt": "Where does it go?", "documents": documents}
        told = chunks(ask(server, "/v1/completions", **text, stream=True, stop=["e"]))
        assert len(told[-1]["kvmosaic"]["documents"]) == 2
        asked = {"input": "Where does it go?", "documents": documents, "max_output_tokens": 6}
        assert ask(server, "/v1/responses", **asked).json()["kvmosaic"]["totals"]["prompt_tokens"] > 20


def test_a_pin_reaches_both_engines_from_any_api_server(server):
    with server.client() as client:
        client.put("/v1/documents/ferry", json={"text": TEXTS[1]}).raise_for_status()
        pinned = client.post("/v1/documents/ferry:pin")
        assert pinned.status_code == 200 and pinned.json()["pinned"], pinned.text
    assert "did not learn" not in server.output()
