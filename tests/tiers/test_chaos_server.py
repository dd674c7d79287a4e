"""A server under load while its Redis or its disk is in every kind of trouble: no request fails, none waits long."""

from __future__ import annotations

import errno
import random
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import httpx
import pytest
from support.redis import RedisServer, Wire
from support.server import RunningServer, ServeCommand, wait_until
from tiers.faulty_files import FaultyFiles

from kvmosaic.server.metrics.request_log import RequestRecord
from kvmosaic.tiers import DiskTier, Tier, open_tier

NUM_DOCUMENTS = 24
CHOSEN = 3
MAX_ADDED_SECONDS = 5.0
"""Milliseconds on a quiet machine; a request that waits for Redis itself waits for as long as the trouble lasts."""


def documents() -> list[dict[str, str]]:
    chance = random.Random(0)
    words = ["ferry", "island", "harbour", "mayor", "storm", "lighthouse", "noon", "green", "bell", "rope"]
    return [
        {
            "id": f"d{number}",
            "text": f"Ferry {number} goes to Oak Island at {number} o'clock. " + " ".join(chance.choices(words, k=120)),
        }
        for number in range(NUM_DOCUMENTS)
    ]


DOCUMENTS = documents()
Expected: TypeAlias = "dict[tuple[int, ...], Answer]"
"""By the documents of a prompt."""


class Load:
    """Clients that ask about random known documents, one after the other, until told to stop."""

    def __init__(self, url: str, expected: Expected, num_clients: int = 1) -> None:
        self._url = url
        self._expected = expected
        self._stop = threading.Event()
        self.faults: list[str] = []
        self._pool = ThreadPoolExecutor(num_clients)
        self._clients = [self._pool.submit(self._ask_on, seed) for seed in range(num_clients)]

    def _ask_on(self, seed: int) -> None:
        chance = random.Random(seed)
        prompts = sorted(self._expected)
        with httpx.Client(base_url=self._url, timeout=60) as client:
            while not self._stop.is_set():
                chosen = chance.choice(prompts)
                try:
                    found = ask(client, chosen)
                except Exception as error:
                    self.faults.append(repr(error))
                    return
                if not found.is_that_of(self._expected[chosen]):
                    self.faults.append(f"{chosen}: {found} instead of {self._expected[chosen]}")

    def stop(self) -> None:
        self._stop.set()
        for client in self._clients:
            client.result(60)
        self._pool.shutdown()
        assert not self.faults, self.faults[:3]


@dataclass(frozen=True, slots=True)
class Answer:
    """A text, and how likely each of its tokens was: wrong keys or values show in the numbers first."""

    text: str
    logprobs: tuple[float, ...]

    def is_that_of(self, other: Answer) -> bool:
        """Whether it is the same but for the order of additions, which depends on what else is computed."""
        close = (abs(a - b) < 1e-3 for a, b in zip(self.logprobs, other.logprobs, strict=False))
        return self.text == other.text and len(self.logprobs) == len(other.logprobs) and all(close)


def ask(client: httpx.Client, chosen: tuple[int, ...]) -> Answer:
    """The answer to a question over some documents."""
    body = {
        "model": "reader",
        "messages": [{"role": "user", "content": f"When does ferry {chosen[0]} go?"}],
        "documents": [DOCUMENTS[number] for number in chosen],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
    }
    reply = client.post("/v1/chat/completions", json=body)
    reply.raise_for_status()
    (choice,) = reply.json()["choices"]
    return Answer(choice["message"]["content"], tuple(token["logprob"] for token in choice["logprobs"]["content"]))


@pytest.fixture(scope="module")
def expected() -> Expected:
    """Answers to many choices of documents, by a server without tiers and with room for all."""
    chance = random.Random(1)
    prompts = [tuple(chance.sample(range(NUM_DOCUMENTS), CHOSEN)) for _ in range(30)]
    with RunningServer() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        return {chosen: ask(client, chosen) for chosen in prompts}


def small_server(*tiers: Tier, loading: str = "always") -> RunningServer:
    """Room for a third of the documents on the device."""
    return RunningServer(tiers=tiers, chunk_cache_size="7MiB", chunk_loading=loading)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.close()


class Watched:
    """A server, its tiers as it sees them, and clients that ask it."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        offloader = server.llm.engine.offloader
        assert offloader is not None
        self.tiered_store = offloader.tiered_store
        self.waits: list[float] = []
        """How long requests waited before anything was computed for them; with one client, for the tiers only."""
        server.call(server.services.records.listen, self._note)

    def _note(self, record: RequestRecord) -> None:
        metrics = record.metrics
        if metrics is not None and metrics.first_scheduled_time is not None:
            self.waits.append(metrics.first_scheduled_time - metrics.arrival_time)

    @property
    def num_loaded(self) -> int:
        return self.server.llm.engine.kv_cache.statistics().loaded_chunks

    def is_used(self) -> Callable[[], bool]:
        """Whether chunks have been loaded since this was called."""
        before = self.num_loaded
        return lambda: self.num_loaded > before + CHOSEN

    def fill(self, expected: Expected) -> None:
        """Asks everything once, so that the tiers have it."""
        with httpx.Client(base_url=self.server.url, timeout=60) as client:
            for chosen, answer in expected.items():
                assert ask(client, chosen).is_that_of(answer)
        assert self.tiered_store.flush(20)


@pytest.mark.parametrize("trouble", ["hangs", "is slow", "is silent", "is killed"])
def test_a_redis_in_trouble_fails_no_request_and_holds_none_up(
    redis: RedisServer, expected: Expected, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the bundled reader computes a document about as fast as Redis gives it: whether to ask is not the question here
    monkeypatch.setattr("kvmosaic.tiers.fetch_policy.FetchPolicy.is_worth", lambda *_: True)
    wire = Wire(str(redis.socket))

    def begin() -> None:
        if trouble == "hangs":
            redis.hang()
        elif trouble == "is killed":
            redis.kill()
        elif trouble == "is slow":
            wire.delay = 0.02
        else:
            wire.silent_after = 0

    def end() -> None:
        wire.delay, wire.silent_after = 0.0, None
        redis.go_on() if trouble == "hangs" else None
        redis.start() if trouble == "is killed" else None

    added = []
    url = redis.url if trouble == "is killed" else f"redis://127.0.0.1:{wire.port}/0"
    with small_server(open_tier(url), loading="auto") as server:
        watched = Watched(server)
        watched.fill(expected)
        load = Load(server.url, expected)
        wait_until(watched.is_used())
        for _ in range(1 if trouble == "is slow" else 3):
            watched.waits.clear()
            begin()
            time.sleep(1.5)
            added.append(max(watched.waits))
            is_used = watched.is_used()
            end()
            wait_until(is_used, 120)
        load.stop()
    wire.close()
    assert statistics.median(added) < MAX_ADDED_SECONDS


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_disk_that_fails_under_load_fails_no_request_and_is_used_again(
    tmp_path: Path, expected: Expected, number: int
) -> None:
    is_failing = threading.Event()
    writing = ("write", "sync", "rename", "remove", "make_folder", "set_time")
    failing = ("open", "read", "names", "facts", *writing) if number == errno.EIO else writing

    def fault(_: int, name: str) -> int | None:
        return number if is_failing.is_set() and name in failing else None

    tier = DiskTier(tmp_path / "cache", 2**24, files=FaultyFiles(fault))
    with small_server(tier) as server:
        watched = Watched(server)
        load = Load(server.url, expected, num_clients=2)
        for _ in range(2):
            wait_until(watched.is_used(), 20)
            is_failing.set()
            time.sleep(1.0)
            is_failing.clear()
        wait_until(watched.is_used(), 20)
        load.stop()
        server.call(server.services.engine.call, lambda engine: engine.check_invariants())
    tier.check_invariants()


def test_two_servers_that_share_a_full_disk_and_a_redis_always_answer_right(
    tmp_path: Path, redis: RedisServer, expected: Expected
) -> None:
    with redis.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 9 * 2**20)
    disk = f"disk:{tmp_path / 'cache'}?quota=6MiB&durable=no"  # a third of the documents
    tiers = ("--chunk-tier", disk, "--chunk-tier", redis.url)
    arguments = ("--chunk-cache-size", "4MiB", "--chunk-loading", "always", *tiers)
    arguments = (*arguments, "--position-strategy", "shared", "--repair", "none")  # as what is expected was answered
    with ServeCommand(*arguments) as first, ServeCommand(*arguments) as second:
        servers = [first.until_ready(), second.until_ready()]
        loads = [Load(server.url, expected, num_clients=2) for server in servers]
        time.sleep(8)
        for server in servers:
            wait_until(partial(has_moved, server.url), 60)
        for load in loads:
            load.stop()
        for server in servers:
            moved = counters(server.url)
            assert moved['kvmosaic:tier_fetches_total{outcome="invalid"}'] == 0
            assert moved['kvmosaic:tier_failures_total{tier="disk"}'] == 0


def has_moved(url: str) -> bool:
    """Whether chunks came from both tiers, and some had to leave."""
    moved = counters(url)
    names = 'hits_total{tier="disk"}', 'hits_total{tier="redis"}', 'evictions_total{tier="disk"}'
    return all(moved.get(f"kvmosaic:tier_{name}", 0) > 0 for name in names)


def counters(url: str) -> dict[str, float]:
    """What /metrics says of the tiers."""
    found = re.findall(
        r'^(kvmosaic:tier_\w+)\{model_name="reader",(\S+)\} (\S+)$', httpx.get(url + "/metrics").text, re.MULTILINE
    )
    return {f"{name}{{{labels}}}": float(value) for name, labels, value in found}
