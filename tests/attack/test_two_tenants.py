"""One tenant floods the server; another one, which asks and reads and asks again, hardly notices."""

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
from support.target import QUESTION, Target, crowding, headers_of

pytestmark = pytest.mark.alone

WORDS = "ferry island harbour cat wheel market mill boat bell garden keeper bridge".split()
ENDLESS = {**QUESTION, "n": 64, "window_tokens": 64, "sink_tokens": 4, "ignore_eos": True, "max_tokens": 2**20}
NUM_ASKED = 8
NUM_ROUNDS = 3
THINKS_SECONDS = 0.2

_numbers = count()


def text(num_words: int, seed: int | None = None) -> str:
    chance = random.Random(next(_numbers) if seed is None else seed)
    return " ".join(chance.choice(WORDS) for _ in range(num_words))


def new_documents() -> dict[str, Any]:
    return {**QUESTION, "documents": [{"text": text(120)} for _ in range(6)]}


def known_documents() -> dict[str, Any]:
    return {**QUESTION, "documents": [{"text": text(120, -number)} for number in range(1, 7)]}


def first_token_seconds(target: Target, body: dict[str, Any]) -> float:
    return target.timed(lambda: read_first_token(target, body))


def read_first_token(target: Target, body: dict[str, Any]) -> None:
    url, headers = f"{target.url}/v1/chat/completions", headers_of("honest")
    with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=300) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
            if choices and choices[0]["delta"].get("content"):
                return
    raise AssertionError("no token came")


def median_seconds(target: Target, ask: Callable[[], dict[str, Any]]) -> float:
    seen = []
    for _ in range(NUM_ASKED):
        seen.append(first_token_seconds(target, ask()))
        time.sleep(THINKS_SECONDS)
    return statistics.median(seen)


def endless_answers(target: Target, is_over: threading.Event) -> None:
    url, headers = f"{target.url}/v1/chat/completions", headers_of("hostile")
    with httpx.stream("POST", url, json={**ENDLESS, "stream": True}, headers=headers, timeout=300) as reply:
        for _ in reply.iter_lines():
            if is_over.is_set():
                return


def long_prompts(target: Target, is_over: threading.Event) -> None:
    while not is_over.is_set():
        body = {**QUESTION, "max_tokens": 1, "documents": [{"text": text(800)} for _ in range(2)]}
        httpx.post(f"{target.url}/v1/chat/completions", json=body, headers=headers_of("hostile"), timeout=300)


@contextmanager
def flooded(target: Target, attack: Callable[[Target, threading.Event], None], num_clients: int) -> Iterator[None]:
    is_over = threading.Event()
    clients = [threading.Thread(target=attack, args=(target, is_over), daemon=True) for _ in range(num_clients)]
    for client in clients:
        client.start()
    try:
        time.sleep(2)  # until all of them are under way
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join(60)


@pytest.mark.parametrize("ask", [new_documents, known_documents])
@pytest.mark.parametrize(("attack", "num_clients"), [(endless_answers, 1), (long_prompts, 8)])
def test_time_to_first_token_at_most_doubles(
    target: Target,
    attack: Callable[[Target, threading.Event], None],
    num_clients: int,
    ask: Callable[[], dict[str, Any]],
) -> None:
    for _ in range(NUM_ROUNDS):  # what else the machine does may come between
        before = median_seconds(target, ask)
        with flooded(target, attack, num_clients):
            meanwhile = median_seconds(target, ask)
        alone = max(before, median_seconds(target, ask))
        print(f"{attack.__name__}, {ask.__name__}: {1e3 * alone:.0f} ms alone, {1e3 * meanwhile:.0f} ms meanwhile")
        if meanwhile <= 2 * crowding() * alone:
            return
    raise AssertionError(f"{NUM_ROUNDS} times more than twice as long as alone, at last {meanwhile / alone:.1f}x")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("two")) as target:
        for body in (known_documents(), new_documents()):
            first_token_seconds(target, body)
        yield target
