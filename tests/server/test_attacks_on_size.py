"""Attacks on size: replies of megabytes, and requests that could never be let in."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.asking import GREEDY, refused
from support.server import RunningServer

from kvmosaic.sampling import Logprob
from kvmosaic.server.generation import answers
from kvmosaic.server.generation.answers import WholeAnswer, reply_of
from kvmosaic.server.openai.request_fields import StreamOptions

ROUTES = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Where?"}],
        **GREEDY,
        "logprobs": True,
        "top_logprobs": 3,
        "n": 2,
    },
    "/v1/completions": {"prompt": ["Where?", "When?"], **GREEDY, "logprobs": 3},
    "/v1/responses": {
        "input": "Where?",
        "temperature": 0,
        "max_output_tokens": 8,
        "ignore_eos": True,
        "top_logprobs": 3,
        "include": ["message.output_text.logprobs"],
    },
}


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_replies_written_beside_the_event_loop_are_the_same(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, route: str, stream: bool
) -> None:
    body = {**ROUTES[route], "stream": stream}
    http.post(route, json=body)  # from now on, everything is reused
    here = http.post(route, json=body)
    monkeypatch.setattr(answers, "MAX_WRITTEN_AT_ONCE", 0)
    beside = http.post(route, json=body)
    assert here.status_code == beside.status_code == 200
    assert here.headers["content-type"] == beside.headers["content-type"]
    if not stream:
        assert _lasting(here.json()) == _lasting(beside.json())
    for reply in (here, beside):
        assert reply.text.count("logprob") > 1


def test_reply_with_many_log_probabilities_is_written_in_a_thread() -> None:
    def write() -> StreamOptions:
        threads.append(threading.current_thread())
        return StreamOptions()

    threads: list[threading.Thread] = []
    candidates = {number: Logprob(-1.0, number + 1, "x") for number in range(20)}
    asyncio.run(reply_of(write, [WholeAnswer(logprobs=[candidates] * 40)]))
    asyncio.run(reply_of(write, [WholeAnswer(logprobs=[candidates] * 40)] * 2))
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_log_probabilities_that_would_fill_the_memory_are_refused(http: httpx.Client) -> None:
    every_one = {"logprobs": True, "top_logprobs": 20, "n": 128}
    error = refused(http, "/v1/chat/completions", messages=[{"role": "user", "content": "Where?"}], **every_one)
    assert error["status"] == 400 and "log probabilities" in error["message"]
    prompts = {"prompt": ["Where?"] * 128, "n": 4, "max_tokens": 100, "logprobs": 20}
    assert refused(http, "/v1/completions", **prompts)["status"] == 400


def test_prompts_that_could_never_be_let_in_together_are_not_told_to_come_again(http: httpx.Client) -> None:
    error = refused(http, "/v1/completions", prompt=["Where?"] * 256, max_tokens=1)
    assert (error["status"], error["param"]) == (400, "prompt")


def _lasting(reply: dict[str, Any]) -> str:
    """What does not differ from request to request."""
    return re.sub(r"[0-9a-f]{32}|'(created|created_at|ms|time_to_first_token_ms)': [0-9.]+", "", str(reply))
