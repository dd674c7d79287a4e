"""One tenant floods the server; another one, which asks and reads and asks again, hardly notices.

What is promised in seconds is tested on a clock of its own, in `engine/test_shares.py`; here what is
measured is the CPU time of the server while the other one waits.
"""

from __future__ import annotations

import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx
import pytest
from support.server import wait_until
from support.target import QUESTION, Target, headers_of

pytestmark = [pytest.mark.alone, pytest.mark.slow]

WORDS = "ferry island harbour cat wheel market mill boat bell garden keeper bridge".split()
ENDLESS = {**QUESTION, "n": 64, "window_tokens": 64, "sink_tokens": 4, "ignore_eos": True, "max_tokens": 2**20}
NUM_ASKED = 8
THINKS_SECONDS = 0.2
MOST_TIMES = 2.5
"""As much for the other one, which shares each step, and what sending its answers costs."""
MOST_STEPS = 16
"""Steps beside that: under way when a request comes, while it is read, and longer ones for the question."""

_numbers = count()

Attack = Callable[[Target, threading.Event, list[float]], None]


def text(num_words: int, seed: int | None = None) -> str:
    chance = random.Random(next(_numbers) if seed is None else seed)
    return " ".join(chance.choice(WORDS) for _ in range(num_words))


def new_documents() -> dict[str, Any]:
    return {**QUESTION, "documents": [{"text": text(120)} for _ in range(6)]}


def known_documents() -> dict[str, Any]:
    return {**QUESTION, "documents": [{"text": text(120, -number)} for number in range(1, 7)]}


def read_first_token(target: Target, body: dict[str, Any]) -> None:
    url, headers = f"{target.url}/v1/chat/completions", headers_of("honest")
    with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=300) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
            if choices and choices[0]["delta"].get("content"):
                return
    raise AssertionError("no token came")


def endless_answers(target: Target, is_over: threading.Event, done: list[float]) -> None:
    url, headers = f"{target.url}/v1/chat/completions", headers_of("hostile")
    with httpx.stream("POST", url, json={**ENDLESS, "stream": True}, headers=headers, timeout=300) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                done.append(time.monotonic())
            if is_over.is_set():
                return


def long_prompts(target: Target, is_over: threading.Event, done: list[float]) -> None:
    while not is_over.is_set():
        body = {**QUESTION, "max_tokens": 1, "documents": [{"text": text(800)} for _ in range(2)]}
        url, headers = f"{target.url}/v1/chat/completions", headers_of("hostile")
        httpx.post(url, json=body, headers=headers, timeout=300).raise_for_status()
        done.append(time.monotonic())


@contextmanager
def flooded(target: Target, attack: Attack, num_clients: int) -> Iterator[list[float]]:
    """Yields when something was done for the attacker: a token of an answer, or a prompt."""
    is_over, done = threading.Event(), list[float]()
    clients = [threading.Thread(target=attack, args=(target, is_over, done), daemon=True) for _ in range(num_clients)]
    for client in clients:
        client.start()
    try:
        time.sleep(2)  # until all of them are under way
        yield done
    finally:
        is_over.set()
        for client in clients:
            client.join(60)


def cpu_seconds_to_first_token(target: Target, ask: Callable[[], dict[str, Any]]) -> list[float]:
    """What the server spends from a request to its first token, of a few that are asked and read; in ticks of 10 ms."""
    seen = []
    for _ in range(NUM_ASKED):
        body = ask()
        begin = target.cpu_seconds
        read_first_token(target, body)
        seen.append(target.cpu_seconds - begin)
        time.sleep(THINKS_SECONDS)
    return seen


@pytest.mark.parametrize("ask", [new_documents, known_documents])
@pytest.mark.parametrize(("attack", "num_clients"), [(endless_answers, 1), (long_prompts, 8)])
def test_little_is_done_for_another_tenant_before_the_first_token(
    target: Target, alone: dict[str, float], attack: Attack, num_clients: int, ask: Callable[[], dict[str, Any]]
) -> None:
    """How many steps that takes depends on how fast the machine is; what is spent on either tenant does not."""
    with flooded(target, attack, num_clients) as done:
        seconds = statistics.median(cpu_seconds_to_first_token(target, ask))
        end = time.monotonic()
        wait_until(lambda: bool(done) and done[-1] > end)  # it has gone on all the time
    print(f"{attack.__name__}, {ask.__name__}: {alone[ask.__name__]:.2f} s alone, {seconds:.2f} s")
    assert seconds <= MOST_TIMES * alone[ask.__name__] + MOST_STEPS * alone["known_documents"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("two")) as target:
        for body in (known_documents(), new_documents()):
            read_first_token(target, body)
        yield target


@pytest.fixture(scope="module")
def alone(target: Target) -> dict[str, float]:
    """What first tokens cost while nobody else asks, with half a tick; known documents cost about a step."""
    asks = (new_documents, known_documents)
    return {ask.__name__: statistics.median(cpu_seconds_to_first_token(target, ask)) + 0.005 for ask in asks}
