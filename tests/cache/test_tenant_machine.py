"""Several tenants with quotas, attacked at random: nobody finds, evicts or reads what is not theirs."""

from __future__ import annotations

from collections import Counter

import pytest
from cache.world import Clock, Memory, Reader, layout_of, make_kv_cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.examples import examples

from kvmosaic.cache import BlockState, Chunk
from kvmosaic.errors import ChunkCacheFull, ChunkInUse, OutOfBlocks, QuotaExceeded, QuotaInUse, UnknownChunk

TENANTS = ["", "a", "b"]
NAMES = [f"document {number}" for number in range(4)]
wishes, systems = st.lists(st.sampled_from(NAMES), max_size=3), st.sampled_from([1, 2])
tenants, names, salts = st.sampled_from(TENANTS), st.sampled_from(NAMES), st.sampled_from(["", "salt"])
chosen_salts = st.sampled_from(["", "salt", None])
quotas = st.sampled_from([None, 0, 3, 5, 7])


class Tenancy(RuleBasedStateMachine):
    """A KV cache, its readers with what they should read back, and the text that each tenant's documents have now."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.memory = Memory()
        self.readers: list[tuple[str, Reader]] = []
        self.quotas: dict[str, int | None] = dict.fromkeys(TENANTS)
        self.versions: Counter[tuple[str, str]] = Counter()
        self.deleted: dict[tuple[str, str], set[Chunk]] = {}
        """Chunks by a name under which nobody may find them any more."""

    @initialize(blocks=st.integers(6, 16), eviction=st.sampled_from(["lru", "priority"]), quota=quotas)
    def make(self, blocks: int, eviction: str, quota: int | None) -> None:
        self.kv_cache = make_kv_cache(
            block_size=2,
            request_blocks=60,
            chunk_blocks=blocks,
            clock=self.clock,
            eviction=eviction,
            max_chunks=7,
            bytes_per_block=10,
        )
        self.set_quota("a", quota)
        self.set_quota("b", 5)

    @rule(tenant=tenants, quota=quotas)
    def set_quota(self, tenant: str, quota: int | None) -> None:
        self.quotas[tenant] = quota
        others = self.chunks_of_others(tenant)
        self.kv_cache.set_quota(tenant, None if quota is None else quota * 10 + 9)
        assert self.chunks_of_others(tenant) == others

    @rule(tenant=tenants, salt=salts, wanted=wishes, system=systems)
    def warm(self, tenant: str, salt: str, wanted: list[str], system: int) -> None:
        """A prompt from beginning to end: what it needed is idle afterwards."""
        num_before = len(self.readers)
        self.allocate(tenant, salt, wanted, system)
        if len(self.readers) > num_before:
            _, reader = self.readers.pop()
            self.compute(reader)
            self.kv_cache.release(reader.allocation)
            self.release_stale()

    @rule(tenant=tenants, salt=salts, wanted=wishes, system=systems)
    def warm_another(self, tenant: str, salt: str, wanted: list[str], system: int) -> None:
        """The same again: most of what happens should fill the cache."""
        self.warm(tenant, salt, wanted, system)

    @rule(tenant=tenants, salt=salts, wanted=wishes, system=systems)
    def allocate(self, tenant: str, salt: str, wanted: list[str], system: int) -> None:
        self.clock.wait(1)
        layout = self.layout(tenant, wanted, system)
        before = self.chunks_of_others(tenant)
        held = {id(chunk) for _, reader in self.readers for chunk in reader.allocation.held_chunks()}
        must_leave = self.room_in_the_pool_is_enough(tenant, layout, salt)
        try:
            allocation = self.kv_cache.allocate(self.kv_cache.plan(layout, salt, tenant))
        except (OutOfBlocks, ChunkCacheFull) as error:
            assert self.chunks_of_others(tenant) == before
            if isinstance(error, QuotaInUse | QuotaExceeded):
                assert self.quotas[tenant] is not None
            if isinstance(error, OutOfBlocks):
                assert any(owner == tenant for owner, _ in self.readers) or not isinstance(error, QuotaInUse)
                assert self.readers, "with nobody running, everything that can ever run can run now"
            return
        if must_leave:
            assert self.chunks_of_others(tenant) == before, "room in a quota is made by the tenant itself"
        computed = [span for span in allocation.spans if span.chunk is not None and span.is_owner]
        if computed and self.quotas[tenant] is not None:
            assert self.kv_cache.tenant_usage(tenant).num_blocks <= self.quotas[tenant]
        for chunk in allocation.held_chunks():
            assert (chunk.tenant, chunk.salt) == (tenant, salt)
            if chunk.is_dropped:
                raise AssertionError("a deleted chunk was found")
            assert id(chunk) in held or chunk.ref_count == 1
        expected = self.memory.expected(layout, salt, tenant)
        self.readers.append((tenant, Reader(layout, salt, allocation, expected, [])))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Some readers compute something; the step may fail."""
        self.kv_cache.begin_step()
        took_part = []
        fails = data.draw(st.integers(0, 5)) == 0
        for _, reader in data.draw(st.lists(st.sampled_from(self.readers), max_size=4, unique_by=id)):
            for span, values in zip(reader.allocation.spans, reader.expected, strict=True):
                left = span.num_tokens - span.num_computed
                if left and (span.chunk is None or span.is_owner):
                    count = data.draw(st.integers(0, left))
                    written = ["wrong"] * count if fails else values[span.num_computed : span.num_computed + count]
                    self.memory.write(span, span.num_computed, written)
                    self.kv_cache.advance(reader.allocation, span.index, count)
                if not span.is_ready:
                    break
            took_part.append(reader)
        if fails:
            for reader in took_part:
                self.kv_cache.rollback_step(reader.allocation)
        self.release_stale()

    def compute(self, reader: Reader) -> None:
        """One step that computes whatever this reader must compute."""
        self.kv_cache.begin_step()
        for span, values in zip(reader.allocation.spans, reader.expected, strict=True):
            if span.chunk is None or span.is_owner:
                first, left = span.num_computed, span.num_tokens - span.num_computed
                self.memory.write(span, first, values[first:])
                self.kv_cache.advance(reader.allocation, span.index, left)

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.clock.wait(1)
        place = data.draw(st.integers(0, len(self.readers) - 1))
        self.kv_cache.release(self.readers.pop(place)[1].allocation)
        self.release_stale()

    @precondition(lambda self: any(all(s.is_ready for s in r.allocation.spans) for _, r in self.readers))
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        ready = [(t, r) for t, r in self.readers if all(span.is_ready for span in r.allocation.spans)]
        tenant, reader = data.draw(st.sampled_from(ready))
        other = self.kv_cache.fork(reader.allocation)
        self.readers.append((tenant, Reader(reader.layout, reader.salt, other, reader.expected, [])))

    @rule(tenant=tenants, name=names, salt=chosen_salts)
    def delete(self, tenant: str, name: str, salt: str | None) -> None:
        others = self.chunks_of_others(tenant)
        self.remember_deleted(tenant, name, salt)
        try:
            self.kv_cache.delete(name, salt, tenant, when_idle=True)
        except UnknownChunk:
            return
        with pytest.raises(UnknownChunk):
            self.kv_cache.find_chunks(name, salt, tenant)
        assert self.chunks_of_others(tenant) == others

    @rule(tenant=tenants, name=names)
    def replace(self, tenant: str, name: str) -> None:
        """A new text under an old name: prompts from now on ask for the new one."""
        self.delete(tenant, name, None)
        self.versions[tenant, name] += 1

    @rule(tenant=tenants, name=names)
    def delete_only_what_is_idle(self, tenant: str, name: str) -> None:
        found = self.found(tenant, name, None)
        try:
            assert self.kv_cache.delete(name, None, tenant) == len(found)
            assert not any(chunk.ref_count for chunk in found)
        except UnknownChunk:
            assert not found
        except ChunkInUse:
            assert any(chunk.ref_count for chunk in found) and self.found(tenant, name, None) == found

    @rule(tenant=tenants, name=names, salt=chosen_salts, pinned=st.booleans())
    def pin(self, tenant: str, name: str, salt: str | None, pinned: bool) -> None:
        found = self.found(tenant, name, salt)
        try:
            count = (self.kv_cache.pin if pinned else self.kv_cache.unpin)(name, salt, tenant)
        except UnknownChunk:
            assert not found
            return
        assert count == len(found) and all(chunk.pinned == pinned for chunk in found)

    @rule(tenant=tenants, name=names, wanted=st.booleans())
    def keep(self, tenant: str, name: str, wanted: bool) -> None:
        self.kv_cache.pin_when_ready(name, tenant, wanted)

    @rule()
    def expire(self) -> None:
        """Everything that nobody uses goes, as when its time is up."""
        self.kv_cache.reset()

    @invariant()
    def books_are_right(self) -> None:
        self.kv_cache.check_invariants()
        for _, reader in self.readers:
            self.memory.check(reader)

    @invariant()
    def usage_is_the_sum_of_the_blocks_of_a_tenant_with_those_that_are_deleted_and_still_in_use(self) -> None:
        chunks = {id(chunk): chunk for chunk in self.kv_cache.chunks()}
        for _, reader in self.readers:
            chunks.update((id(chunk), chunk) for chunk in reader.allocation.held_chunks())
        usages = self.kv_cache.usages()
        for tenant in TENANTS:
            mine = [chunk for chunk in chunks.values() if chunk.tenant == tenant]
            usage = self.kv_cache.tenant_usage(tenant)
            has_any = bool(mine) or self.quotas[tenant] is not None
            assert usages.get(tenant) == (usage if has_any else None)
            assert usage.num_blocks == sum(len(chunk.block_ids) for chunk in mine)
            assert usage.num_bytes == 10 * usage.num_blocks
            assert usage.num_chunks == sum(chunk.tenant == tenant for chunk in self.kv_cache.chunks())
            quota = self.quotas[tenant]
            if quota is not None and usage.num_blocks > quota:
                assert all(chunk.ref_count or chunk.pinned for chunk in mine), "what is idle above the quota has left"
        assert self.kv_cache.chunk_pool.num_used == sum(len(chunk.block_ids) for chunk in chunks.values())

    @invariant()
    def a_key_finds_a_chunk_for_its_own_tenant_only(self) -> None:
        for chunk in self.kv_cache.chunks():
            for tenant in TENANTS:
                try:
                    assert self.kv_cache.find_chunks(chunk.key, None, tenant) == [chunk] and tenant == chunk.tenant
                except UnknownChunk:
                    assert tenant != chunk.tenant

    @invariant()
    def deleted_chunks_are_found_under_no_name(self) -> None:
        for (tenant, name), chunks in self.deleted.items():
            assert not chunks & set(self.found(tenant, name, None))
        assert not set().union(*self.deleted.values()) & set(self.kv_cache.chunks())

    @invariant()
    def the_block_map_is_what_one_gets_by_counting(self) -> None:
        readers: Counter[tuple[str, int]] = Counter()
        for _, reader in self.readers:
            for span in reader.allocation.spans:
                if span.chunk is None:
                    readers.update(("request", block) for block in span.table.block_ids)
            for chunk in reader.allocation.held_chunks():
                readers.update(("chunk_cache", block) for block in chunk.block_ids)
        kept = {("request", block) for block in self.kv_cache._prefix.block_ids()}
        kept |= {("chunk_cache", block) for chunk in self.kv_cache.chunks() for block in chunk.block_ids}
        pinned = {("chunk_cache", b) for chunk in self.kv_cache.chunks() if chunk.pinned for b in chunk.block_ids}
        block_map = self.kv_cache.block_map()
        for pool, states in (("request", block_map.request), ("chunk_cache", block_map.chunk_cache)):
            for block, state in enumerate(states):
                count = readers[pool, block]
                idle = BlockState.IDLE if (pool, block) in kept else BlockState.FREE
                alone = (idle, BlockState.IN_USE, BlockState.SHARED)[min(count, 2)]
                assert state == (BlockState.PINNED if (pool, block) in pinned else alone)

    def teardown(self) -> None:
        if not hasattr(self, "kv_cache"):
            return
        for _, reader in self.readers:
            self.kv_cache.release(reader.allocation)
        self.kv_cache.check_invariants()
        self.kv_cache.reset()
        assert self.kv_cache.chunk_pool.num_used == self.kv_cache.request_pool.num_used == 0
        assert all(self.kv_cache.tenant_usage(tenant).num_blocks == 0 for tenant in TENANTS)

    def layout(self, tenant: str, wanted: list[str], system: int):
        def text(name: str) -> list[int]:
            number = NAMES.index(name)
            return [100 + 10 * self.versions[tenant, name] + number] * (2 * number + 1)

        return layout_of([system] * 3, [text(name) for name in wanted], [system, 9], names=wanted)

    def found(self, tenant: str, name: str, salt: str | None) -> list[Chunk]:
        try:
            found = self.kv_cache.find_chunks(name, salt, tenant)
        except UnknownChunk:
            return []
        assert all(chunk.tenant == tenant and (salt is None or chunk.salt == salt) for chunk in found)
        return found

    def remember_deleted(self, tenant: str, name: str, salt: str | None) -> None:
        self.deleted.setdefault((tenant, name), set()).update(self.found(tenant, name, salt))

    def chunks_of_others(self, tenant: str) -> list[int]:
        return [id(chunk) for chunk in self.kv_cache.chunks() if chunk.tenant != tenant]

    def room_in_the_pool_is_enough(self, tenant: str, layout, salt: str) -> bool:
        """Whether pool and index have room for what is missing, so that only a quota can make anything leave."""
        plan = self.kv_cache.plan(layout, salt, tenant)
        missing = {span.key: span.num_tokens for span in plan.spans if span.is_chunk and not span.block_ids}
        blocks = sum(self.kv_cache.chunk_pool.blocks_for(count) for count in missing.values())
        return blocks <= self.kv_cache.chunk_pool.num_free and len(self.kv_cache.chunks()) + len(missing) <= 7

    def release_stale(self) -> None:
        for entry in [entry for entry in self.readers if entry[1].allocation.is_stale]:
            self.readers.remove(entry)
            self.kv_cache.release(entry[1].allocation)


TestTenancy = Tenancy.TestCase
TestTenancy.settings = settings(max_examples=examples(150), stateful_step_count=50, deadline=None)
