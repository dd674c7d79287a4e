"""What is written behind is what the chunk held, whatever became of its blocks before the writer came to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, build_engine, set_offloader
from support.examples import examples
from support.loaded import loaded_family, random_prompt
from support.tiers import GATE_SECONDS, HandClock, TroubledTier

from kvmosaic.cache import Chunk, Key
from kvmosaic.config import TierConfig
from kvmosaic.engine import Engine
from kvmosaic.engine import engine_core as engine_module
from kvmosaic.engine.chunk_entries import ChunkEntries
from kvmosaic.engine.chunk_offloader import ChunkOffloader
from kvmosaic.memory import BlockStorage, ChunkTensors
from kvmosaic.tiers import Deadline, TieredStore

MEBIBYTE = 2**20


class GatedTier(TroubledTier):
    """Its writer waits at the door, before it has read what it is to write; those who read do not."""

    def __init__(self) -> None:
        super().__init__("disk")
        self.door = threading.Event()
        self.door.set()

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        assert self.door.wait(GATE_SECONDS)
        return super().exists_many(keys, deadline)


class Watched:
    """An engine whose writer stands still until it is let go, and what every chunk held when it was complete."""

    def __init__(self, *, chunk_blocks: int = 12) -> None:
        self.disk = GatedTier()
        self.engine: Engine = build_engine(loaded_family("llama", torch.float64), blocks=(64, chunk_blocks))
        self.storage: BlockStorage = self.engine.runner.storages["chunk_cache"]
        self.entries = ChunkEntries(self.engine.runner.model.fingerprint, self.storage, TierConfig())
        clock = HandClock()  # stands still: nobody loses patience
        self.tiered_store: TieredStore = TieredStore(
            [self.disk], max_pending_bytes=MEBIBYTE, loading="always", clock=clock
        )
        offloader = ChunkOffloader(
            self.engine.kv_cache, self.storage, self.tiered_store, self.entries, max_staged_bytes=MEBIBYTE, clock=clock
        )
        self.offloader = set_offloader(self.engine, offloader)
        self.held: dict[Key, ChunkTensors] = {}
        self.decoders: dict[Key, Callable[[Any], Any]] = {}
        self.readers: list[str] = []
        keep, read, fetch = self.offloader.on_computed, self.storage.read_chunk, self.offloader._fetch

        def noted_keep(chunk: Chunk, seconds: float) -> None:
            self.held[chunk.key] = read(chunk.block_ids, chunk.num_tokens)
            keep(chunk, seconds)

        def noted_read(*arguments: Any) -> ChunkTensors:
            self.readers.append(threading.current_thread().name)
            return read(*arguments)

        def noted_fetch(span: Any, start: int, rank: Any) -> Any:
            self.decoders[span.key] = self.entries.accept(span, start)
            return fetch(span, start, rank)

        self.offloader.on_computed, self.storage.read_chunk = noted_keep, noted_read  # type: ignore[method-assign]
        self.offloader._fetch = noted_fetch  # type: ignore[method-assign]

    def ask(self, seed: int) -> None:
        self.engine.run([self.engine.add_request(random_prompt(seed), GREEDY)])
        self.engine.check_invariants()

    def check(self) -> int:
        """Lets the writer go; every entry holds what its chunk held. Returns how many there are."""
        self.disk.door.set()
        assert self.tiered_store.flush(20)
        for key, entry in self.disk.entries.items():
            found = self.decoders[key](entry).tensors()
            for one, other in zip(found, self.held[key], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        return len(self.disk.entries)

    def close(self) -> None:
        self.disk.door.set()
        self.engine.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


def test_a_chunk_that_stays_is_read_by_the_writer_and_not_by_the_engine(watched: Watched) -> None:
    watched.ask(0)
    assert watched.check() == 3
    assert len(watched.readers) == 3 and set(watched.readers) == {"kvmosaic-tiers-0"}


def test_a_chunk_whose_blocks_are_wanted_first_is_copied_before(watched: Watched) -> None:
    watched.disk.door.clear()
    for seed in range(4):  # the pool has room for one prompt
        watched.ask(seed)
    assert "MainThread" in watched.readers
    assert watched.check() == 12


def clear(watched: Watched) -> None:
    watched.engine.kv_cache.reset()


def sleep_and_wake(level: int) -> Callable[[Watched], None]:
    def sleep(watched: Watched) -> None:
        watched.engine.sleep(level)
        while not watched.engine.is_asleep:
            watched.engine.step()
        watched.engine.wake()

    return sleep


def fail_a_step(watched: Watched) -> None:
    """What the step computed is abandoned; its chunks had been queued to be written."""
    keep = watched.offloader.on_computed

    def kept_and_failed(chunk: Chunk, seconds: float) -> None:
        keep(chunk, seconds)
        raise RuntimeError("the device is on fire")

    watched.offloader.on_computed = kept_and_failed  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="on fire"):
        watched.ask(9)
    watched.offloader.on_computed = keep  # type: ignore[method-assign]


@pytest.mark.parametrize("trouble", [clear, sleep_and_wake(1), sleep_and_wake(2), fail_a_step])
def test_blocks_that_are_given_back_in_any_way_are_copied_before(
    watched: Watched, trouble: Callable[[Watched], None]
) -> None:
    watched.disk.door.clear()
    watched.ask(0)
    trouble(watched)
    for seed in (1, 2):
        watched.ask(seed)
    assert watched.check() >= 9


def test_a_chunk_that_is_deleted_before_it_was_written_is_not_written(watched: Watched) -> None:
    watched.disk.door.clear()
    watched.ask(0)
    first, second, third = watched.engine.kv_cache.chunks()
    watched.engine.kv_cache.delete(second.key)
    watched.ask(1)
    watched.check()
    assert second.key not in watched.disk.entries
    assert {first.key, third.key} <= watched.disk.entries.keys()


def test_a_copy_that_fails_stores_nothing_and_gives_the_blocks_back(watched: Watched) -> None:
    watched.disk.door.clear()
    watched.ask(0)
    lost = {chunk.key for chunk in watched.engine.kv_cache.chunks()}
    read = watched.storage.read_chunk

    def broken(*_: Any) -> ChunkTensors:
        raise MemoryError

    watched.storage.read_chunk = broken  # type: ignore[method-assign]
    watched.engine.kv_cache.reset()
    assert watched.engine.kv_cache.chunk_pool.num_free == 12
    watched.storage.read_chunk = read  # type: ignore[method-assign]
    watched.ask(1)
    assert watched.check() == 3
    assert not lost & watched.disk.entries.keys()


@given(
    moves=st.lists(
        st.one_of(
            st.integers(0, 5).map(lambda seed: ("ask", seed)),
            st.sampled_from([("gate", 0), ("gate", 1), ("delete", 0), ("clear", 0), ("sleep", 1), ("sleep", 2)]),
            st.integers(1, 3).map(lambda count: ("evict", count)),
        ),
        max_size=14,
    )
)
@settings(max_examples=examples(25), deadline=None)
def test_no_order_of_events_writes_what_a_chunk_did_not_hold(moves: list[tuple[str, int]]) -> None:
    watched = Watched(chunk_blocks=14)
    kv_cache = watched.engine.kv_cache
    try:
        for move, number in moves:
            match move:
                case "ask":
                    watched.ask(number)
                case "gate":
                    watched.disk.door.set() if number else watched.disk.door.clear()
                case "delete" if kv_cache.chunks():
                    kv_cache.delete(kv_cache.chunks()[0].key)
                case "clear":
                    kv_cache.reset()
                case "sleep":
                    sleep_and_wake(number)(watched)
                case "evict":
                    for _ in range(number):
                        kv_cache._chunks.evict_one()
        watched.check()
    finally:
        watched.close()


def test_chunks_of_a_step_that_fails_after_its_forward_are_not_stored(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patched:
        patched.setattr(engine_module, "sample", fails)
        with pytest.raises(RuntimeError, match="the device is gone"):
            watched.ask(1)
    watched.ask(2)
    assert watched.check() == 3
    assert set(watched.disk.entries) == {chunk.key for chunk in watched.engine.kv_cache.chunks()}
