"""Attacks on the tiered store: tiers that raise what no tier may, threads that cannot start, killed processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiers import TroubledTier

from kvmosaic.cache import Key
from kvmosaic.entries.codec import Int8
from kvmosaic.errors import TierFull, TierUnavailable
from kvmosaic.tiers import Deadline, Entry, TieredStore
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tiers.tiered_store import PUT_SECONDS

KEYS = [Key(bytes([number]) * 32) for number in range(8)]


class Bug(Exception):
    """What no tier says it raises."""


class BuggyTier(TroubledTier):
    """Raises what it must not, from the methods that it is told."""

    def __init__(self, *methods: str, name: str = "buggy") -> None:
        super().__init__(name)
        self.methods = methods

    def _call(self, what: str, keys: Any, seconds: float = 0.0) -> None:
        super()._call(what, keys, seconds)
        if what in self.methods:
            raise Bug(what)


def store(tiered_store: TieredStore[bytes], key: Key, **more: Any) -> bool:
    return tiered_store.store(key, b"value", 5, bytes, persistent=True, volatile=True, **more)


def fetched(tiered_store: TieredStore[bytes], key: Key) -> bytes | None:
    fetch = tiered_store.fetch(key, 5, bytes, None)
    assert fetch is not None
    end = time.monotonic() + 60
    while not fetch.is_over and time.monotonic() < end:
        tiered_store.wait(0.01)
    assert fetch.is_over
    return fetch.value


def test_a_tier_with_a_bug_does_not_end_the_writer() -> None:
    tier, other = BuggyTier("delete", "exists"), TroubledTier("other")
    tiered_store: TieredStore[bytes] = TieredStore([tier, other], max_pending_bytes=100)
    tiered_store.delete(KEYS[:1])
    assert tiered_store.flush(60)
    told: list[bool] = []

    def done(is_stored: bool) -> None:
        told.append(is_stored)
        raise Bug("done")

    store(tiered_store, KEYS[1], done=done)
    store(tiered_store, KEYS[2])
    assert tiered_store.flush(60) and tiered_store.pending_bytes == 0
    assert set(other.entries) == {KEYS[1], KEYS[2]} and told == [False]
    tiered_store.close()


@pytest.mark.parametrize("method", ["get", "quarantine"])
def test_a_tier_with_a_bug_does_not_hide_the_next_one(method: str) -> None:
    tier, other = BuggyTier(method), TroubledTier("other")
    tier.entries[KEYS[0]] = b"bad"
    other.entries[KEYS[0]] = b"good"
    tiered_store: TieredStore[bytes] = TieredStore([tier, other], max_pending_bytes=100)

    def accept(entry: Entry) -> bytes:
        if bytes(entry) != b"good":
            from kvmosaic.errors import DamagedEntry

            raise DamagedEntry("bad")
        return bytes(entry)

    fetch = tiered_store.fetch(KEYS[0], 5, accept, None)
    assert fetch is not None
    end = time.monotonic() + 60
    while not fetch.is_over and time.monotonic() < end:
        time.sleep(0.005)
    assert fetch.value == b"good"
    tiered_store.close()


def test_threads_that_could_not_start_are_started_later(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = TroubledTier()
    tier.entries[KEYS[0]] = b"there"
    tiered_store: TieredStore[bytes] = TieredStore([tier], max_pending_bytes=100)
    starts: list[int] = []
    start = threading.Thread.start

    def sometimes(thread: threading.Thread) -> None:
        starts.append(1)
        if len(starts) in (1, 3):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", sometimes)
    assert store(tiered_store, KEYS[1])
    assert store(tiered_store, KEYS[2])
    assert fetched(tiered_store, KEYS[0]) == b"there"
    assert tiered_store.flush(60) and set(tier.entries) == set(KEYS[:3])
    tiered_store.close()
    assert tier.is_closed


def test_a_breaker_that_could_not_start_its_probe_does_not_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = TroubledTier()
    breaker = Breaker(tier, interval_seconds=0.01)

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        tier.error = TierUnavailable("down")
        with pytest.raises(TierUnavailable):
            breaker.get_many(KEYS[:1], Deadline(1))
    tier.error = None
    assert breaker.get_many(KEYS[:1], Deadline(1)) == {}
    breaker.close()


def test_an_unreferenced_tiered_store_writes_what_it_has_and_ends() -> None:
    tier = TroubledTier()
    tiered_store: TieredStore[bytes] = TieredStore([tier], max_pending_bytes=100)
    tier.gate.clear()
    store(tiered_store, KEYS[0])
    store(tiered_store, KEYS[1])
    alive, threads = weakref.ref(tiered_store), list(tiered_store._threads)
    tiered_store.orphan()
    del tiered_store
    tier.gate.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    del threads, thread
    gc.collect()
    assert set(tier.entries) == {KEYS[0], KEYS[1]} and tier.is_closed and alive() is None


ENDS = """
import sys, time
sys.path.insert(0, {tests!r})
from kvmosaic.tiers import Deadline, TieredStore, open_tier
class Slow:
    name, is_persistent = "slow", True
    def __init__(self, tier): self.tier = tier
    def __getattr__(self, name): return getattr(self.tier, name)
    def put_many(self, entries, deadline):
        time.sleep(0.02)
        return self.tier.put_many(entries, deadline)
tiered_store = TieredStore([Slow(open_tier("disk:{folder}?quota=1GiB"))], max_pending_bytes=10**6)
for number in range(20):
    tiered_store.store(bytes([number]) * 32, b"value", 5, bytes, persistent=True, volatile=False)
{end}
"""


@pytest.mark.parametrize("end", ["", "sys.exit(0)", "del tiered_store", "tiered_store.orphan(); del tiered_store"])
def test_a_process_that_ends_without_closing_has_everything_written(tmp_path: Path, end: str) -> None:
    script = ENDS.format(tests=str(Path(__file__).parents[1]), folder=tmp_path / "disk", end=end)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert len(_stored(tmp_path / "disk")) == 20


def test_a_forked_process_ends_at_once_and_leaves_the_tiers_alone() -> None:
    tier = TroubledTier()
    tier.put_seconds = 0.2
    tiered_store: TieredStore[bytes] = TieredStore([tier], max_pending_bytes=100)
    for key in KEYS:
        store(tiered_store, key)
    child = os.fork()
    if child == 0:
        begin = time.monotonic()
        tiered_store._close_at_exit()
        os._exit(0 if time.monotonic() - begin < PUT_SECONDS / 2 and not tier.is_closed else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert tiered_store.flush(60)
    tiered_store.close()


def _stored(folder: Path) -> set[Key]:
    return {Key(bytes.fromhex(path.stem)) for path in folder.glob("??/*.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("along", ["tokens", "channels"])
@pytest.mark.parametrize(("size", "shift"), [(1.0, 0.0), (3.0, 1.0), (0.2, 40.0), (1e-3, 0.0)])
def test_errors_do_not_grow_however_often_a_chunk_leaves(dtype, along, size, shift) -> None:
    generator = torch.Generator().manual_seed(7)
    numbers = (torch.randn(70, 2, 64, generator=generator) * size + shift).to(dtype)
    codec, found, errors = Int8(), numbers, []
    for _ in range(40):
        parts = codec.encode(found, along)
        assert parts is not None
        found = codec.decode(parts, (70, 2, 64), dtype, along)
        errors.append((found.double() - numbers.double()).abs().mean().item())
    assert errors[-1] <= errors[0] * 1.05, f"from {errors[0]} to {errors[-1]}"


def test_a_tier_that_is_down_does_not_make_flush_wait() -> None:
    tier = TroubledTier()
    tier.error = TierUnavailable("down")
    tiered_store: TieredStore[bytes] = TieredStore([tier], max_pending_bytes=100)
    for key in KEYS:
        store(tiered_store, key)
    assert tiered_store.flush(60) and tiered_store.stats.failed == len(KEYS) and tiered_store.pending_bytes == 0
    tiered_store.close()


def test_a_full_tier_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    tier = TroubledTier()
    tier.error = TierFull("no room left; make the quota smaller than what is free")
    tiered_store: TieredStore[bytes] = TieredStore([Breaker(tier)], max_pending_bytes=100)
    for key in KEYS:
        store(tiered_store, key)
        assert tiered_store.flush(60)
    tiered_store.close()
    said = [record.message for record in caplog.records]
    assert said == [f"the troubled tier takes no chunks: {tier.error}"] and tiered_store.stats.failed == len(KEYS)


def test_a_tier_that_gives_more_than_it_was_asked_for_is_not_believed() -> None:
    """An entry that a tier of somebody's own reads all the same is refused by its size."""
    tier = TroubledTier()
    tier.entries[KEYS[0]] = bytes(1000)
    tiered_store: TieredStore[bytes] = TieredStore([Breaker(tier)], max_pending_bytes=100)
    fetch = tiered_store.fetch(KEYS[0], 5, bytes, None, max_bytes=999)
    assert fetch is not None
    end = time.monotonic() + 60
    while not fetch.is_over and time.monotonic() < end:
        tiered_store.wait(0.01)
    assert fetch.value is None and KEYS[0] in tier.aside and tiered_store.stats.invalid == 1
    tiered_store.close()
