"""The allocator: turns a plan into an allocation, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvmosaic.cache.allocation import Allocation, SpanAllocation
from kvmosaic.cache.block_table import BlockCopy, BlockTable
from kvmosaic.cache.capacity_check import BlockDemand, CapacityCheck
from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import Key, KeyChain
from kvmosaic.cache.lookup import CacheHit, is_closed
from kvmosaic.cache.plan import Action, Plan, SpanPlan
from kvmosaic.cache.prefix_cache import PrefixCache, PrefixEntry
from kvmosaic.cache.same_text_index import sees_only_system
from kvmosaic.cache.statistics import Counters
from kvmosaic.errors import OutOfBlocks


class Allocator:
    """All-or-nothing allocator: acquires cache hits first, so that evicting for the rest cannot free them."""

    def __init__(self, prefix: PrefixCache, chunks: ChunkIndex, room: CapacityCheck, counters: Counters) -> None:
        self._prefix = prefix
        self._chunks = chunks
        self._room = room
        self._counters = counters

    def allocate(self, plan: Plan, found: Sequence[CacheHit], chain: KeyChain, *, again: bool = False) -> Allocation:
        """Acquires everything that was found and allocates blocks for the rest; see `KVCache.allocate`.

        Args:
            plan: what to allocate.
            found: the current cache hits of its spans.
            chain: makes the keys of blocks and chunks to register.
            again: whether its hits were already counted, because the prompt was allocated before.
        """
        need = self._need(plan, found)
        for here in found:
            self._prefix.acquire(_held(here))
            self._prefix.pool.retain(entry.block_id for entry in _held(here))
        known: dict[Key, Chunk] = {here.chunk.key: here.chunk for here in found if here.chunk is not None}
        for chunk in known.values():
            self._chunks.acquire(chunk)
        held, spans, copies = dict(known), list[SpanAllocation](), list[BlockCopy]()
        try:
            self._room.make(need)
            for span, here in zip(plan.spans, found, strict=True):
                if span.is_chunk:
                    spans.append(self._allocate_chunk(plan, span, held, again))
                else:
                    spans.append(self._allocate_prefix(plan, span, here, copies, again))
        except BaseException:
            self._detach(spans, found, held, known)
            raise
        for here in found:
            for entry in _held(here):
                entry.hits += not again
            if here.source is not None:
                self._prefix.release((here.source,))  # the step copies it before anything is written
        for chunk in known.values():
            self._chunks.pin_if_kept(chunk)
        return Allocation(plan.layout, plan.salt, plan.tenant, spans, chain, copies)

    def _need(self, plan: Plan, found: Sequence[CacheHit]) -> BlockDemand:
        """What the plan demands; without blocks to copy into, nothing is copied."""
        try:
            return self._room.check(plan, found)
        except OutOfBlocks:
            if all(here.source is None for here in found):
                raise
            for here in found:
                here.source, here.num_copied = None, 0
            return self._room.check(plan, found)

    def _detach(
        self,
        spans: Sequence[SpanAllocation],
        found: Sequence[CacheHit],
        held: dict[Key, Chunk],
        known: dict[Key, Chunk],
    ) -> None:
        """Undoes an allocation that failed half way."""
        for span in spans:
            if span.chunk is None:
                span.table.release()
        for here in found[len(spans) :]:
            self._prefix.pool.release([entry.block_id for entry in _held(here)])
        for here in found:
            self._prefix.release(_held(here))
        for key, chunk in held.items():
            if key not in known:
                self._chunks.abandon(chunk)
            self._chunks.release(chunk)

    def _allocate_chunk(self, plan: Plan, span: SpanPlan, held: dict[Key, Chunk], again: bool) -> SpanAllocation:
        chunk = held.get(span.key)
        is_owner, has_twin = chunk is None, False
        if chunk is None:
            start = plan.layout.spans[span.index].start
            chunk = self._chunks.create(
                span.key, span.root, span.tokens, start, plan.salt, plan.tenant, identity=span.identity
            )
            self._chunks.acquire(chunk)
            held[span.key] = chunk
            if sees_only_system(plan.layout, span.index):
                has_twin = self._chunks.twins.has_ready(plan.tenant, plan.salt, span.tokens)
                self._chunks.twins.add(chunk)
        else:
            chunk.hits += not again
        if is_owner or not again:
            self._counters.count_chunk(span, is_hit=not is_owner)
        if span.name is not None:
            self._chunks.name(chunk, span.name)
        if (priority := plan.layout.spans[span.index].segment.priority) is not None:
            chunk.priority = priority  # it is referenced, so it is not in the eviction queue
        action: Action = "compute" if is_owner else ("reuse" if chunk.is_ready else "wait")
        return SpanAllocation(
            span.index,
            span.kind,
            action,
            chunk.table,
            span.root,
            bytearray(),
            chunk=chunk,
            is_owner=is_owner,
            has_twin=has_twin,
        )

    def _allocate_prefix(
        self, plan: Plan, span: SpanPlan, here: CacheHit, copies: list[BlockCopy], again: bool
    ) -> SpanAllocation:
        pool, closed = self._prefix.pool, is_closed(plan.layout, span.index)
        reused = min(len(here.entries) * pool.block_size, span.num_tokens) + here.num_copied
        block_ids = [entry.block_id for entry in _held(here)]
        table = BlockTable.adopt(pool, block_ids, reused, grows=not closed)
        new = table.append(span.num_tokens - reused)
        assert len(new) == (here.source is not None), "nothing is written into a block that others may read"
        copies += new
        if not again:
            self._counters.prefix_lookup_tokens += span.num_tokens
            self._counters.prefix_hit_tokens += reused
        action: Action = "reuse" if reused == span.num_tokens else "compute"
        return SpanAllocation(
            span.index,
            span.kind,
            action,
            table,
            span.root,
            bytearray(span.tokens),
            is_closed=closed,
            computed=reused,
            entries=here.entries,
        )


def _held(here: CacheHit) -> list[PrefixEntry]:
    """The prefix entries that an allocation acquires: the shared ones, and the copied one."""
    return here.entries if here.source is None else [*here.entries, here.source]
