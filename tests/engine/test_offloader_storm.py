"""Anything in any order, over real tiers that fail now and then: nothing is lost, and answers do not change."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from functools import cache
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.engines import GREEDY, build_engine, set_offloader
from support.loaded import loaded_family, random_prompt

from kvmosaic.cache import Key
from kvmosaic.config import TierConfig
from kvmosaic.engine import Engine, Request
from kvmosaic.engine.chunk_entries import ChunkEntries
from kvmosaic.engine.chunk_offloader import ChunkOffloader
from kvmosaic.errors import TierUnavailable
from kvmosaic.prompt import Prompt
from kvmosaic.tiers import Deadline, DiskTier, Entry, HostTier, TieredStore

MEBIBYTE = 2**20
NUM_PROMPTS = 6


@cache
def prompts() -> list[Prompt]:
    """Some share documents behind one system prompt, in another order."""
    found = [random_prompt(seed) for seed in range(NUM_PROMPTS - 2)]
    for seed in range(2):
        parts = [segment.token_ids for segment in random_prompt(seed).segments]
        found.append(Prompt.from_tokens(parts[0], parts[-2:0:-1], parts[-1]))
    return found


@cache
def expected(index: int) -> tuple[int, ...]:
    """What an engine without tiers answers."""
    engine = build_engine(loaded_family("llama", torch.float64))
    request = engine.add_request(prompts()[index], GREEDY)
    engine.run([request])
    return request.output().outputs[0].token_ids


class UnsteadyDisk(DiskTier):
    """A disk tier that can be taken away and given back."""

    is_gone = False

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        self._check()
        return super().get_many(keys, deadline, max_bytes=max_bytes)

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        self._check()
        return super().exists_many(keys, deadline)

    def _check(self) -> None:
        if self.is_gone:
            raise TierUnavailable("the disk is gone")


class OffloaderStorm(RuleBasedStateMachine):
    """An engine with tiny pools behind which everything happens."""

    @initialize(staged=st.sampled_from([1, 20_000, MEBIBYTE]), pending=st.sampled_from([1, 20_000, MEBIBYTE]))
    def begin(self, staged: int, pending: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.engine: Engine = build_engine(
            loaded_family("llama", torch.float64), blocks=(40, 12), max_batched_tokens=32, max_running=3
        )
        storage = self.engine.runner.storages["chunk_cache"]
        self.disk = UnsteadyDisk(Path(self.folder.name) / "disk", 150_000)
        self.tiered_store: TieredStore = TieredStore([HostTier(60_000), self.disk], max_pending_bytes=pending)
        entries = ChunkEntries(self.engine.runner.model.fingerprint, storage, TierConfig())
        self.offloader = ChunkOffloader(
            self.engine.kv_cache, storage, self.tiered_store, entries, max_staged_bytes=staged
        )
        self.offloader._compute.estimate = lambda num_tokens: float(num_tokens)  # or loading a tiny chunk may not pay
        set_offloader(self.engine, self.offloader)
        self.asked: list[tuple[int, Request]] = []

    @rule(index=st.integers(0, NUM_PROMPTS - 1), priority=st.integers(0, 1))
    def ask(self, index: int, priority: int) -> None:
        if self.engine.scheduler.num_waiting < 12:
            self.asked.append((index, self.engine.add_request(prompts()[index], GREEDY, priority=priority)))

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        _, request = data.draw(st.sampled_from(self.asked))
        self.engine.abort_all([request])

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if chunks := self.engine.kv_cache.chunks():
            chunk = data.draw(st.sampled_from(chunks))
            self.engine.kv_cache.delete(chunk.key, None, when_idle=True)

    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        if chunks := self.engine.kv_cache.chunks():
            chunk = data.draw(st.sampled_from(chunks))
            others = [other for other in chunks if other.pinned and other is not chunk]
            if pinned and not others:  # two could leave no room for a prompt
                self.engine.kv_cache.pin(chunk.key, None)
            elif not pinned:
                self.engine.kv_cache.unpin(chunk.key, None)

    @rule()
    def evict_cold(self) -> None:
        self.engine.kv_cache.evict_cold(2**40, 0.0)

    @rule(level=st.sampled_from([1, 2]))
    def sleep(self, level: int) -> None:
        self.engine.sleep(level)

    @rule()
    def wake(self) -> None:
        self.engine.wake()

    @rule(is_gone=st.booleans())
    def lose(self, is_gone: bool) -> None:
        self.disk.is_gone = is_gone

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_invariants()
        self.disk.check_invariants()
        unfinished = self.engine.unfinished_requests
        sequences = [sequence for request in unfinished for sequence in self.engine._requests.sequences_of(request)]
        held = {id(staged): staged for sequence in sequences for staged in (sequence.fetches or {}).values()}
        assert self.offloader._staged_bytes == sum(staged.fetch.num_bytes for staged in held.values())
        assert all(staged.num_holders > 0 for staged in held.values())
        assert all(staged in held.values() for staged in self.offloader._staged.values())
        waiting = [sequence for sequence in sequences if sequence.allocation is None]
        assert self.engine.scheduler.num_waiting == len(waiting)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.wake()
        for chunk in self.engine.kv_cache.chunks():
            self.engine.kv_cache.unpin(chunk.key, None)
        requests = [request for _, request in self.asked]
        while self.engine.has_unfinished_requests:
            self.engine.step()
            self.holds()
        for (index, _), request in zip(self.asked, requests, strict=True):
            assert request.error is None
            found = request.output().outputs[0]
            assert found.token_ids == expected(index) or found.finish_reason == "abort"
        assert self.tiered_store.flush(10)
        assert (self.offloader._staged_bytes, self.tiered_store.pending_bytes) == (0, 0)
        self.engine.close()
        self.folder.cleanup()


TestOffloaderStorm = OffloaderStorm.TestCase
TestOffloaderStorm.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
