"""Attaching: a plan is made true, all of it or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvmosaic.cache.attachment import AttachedSpan, Attachment
from kvmosaic.cache.block_table import BlockCopy, BlockTable
from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import Key, KeyChain
from kvmosaic.cache.lookup import Found, is_closed
from kvmosaic.cache.plan import Action, Plan, SpanPlan
from kvmosaic.cache.prefix_cache import PrefixCache, PrefixEntry
from kvmosaic.cache.room import Need, Room
from kvmosaic.cache.statistics import Counters
from kvmosaic.cache.twins import sees_only_system
from kvmosaic.errors import OutOfBlocks


class Attacher:
    """Holds what a plan reuses first, so that making room for the rest cannot evict it."""

    def __init__(self, prefix: PrefixCache, chunks: ChunkIndex, room: Room, counters: Counters) -> None:
        self._prefix = prefix
        self._chunks = chunks
        self._room = room
        self._counters = counters

    def attach(self, plan: Plan, found: Sequence[Found], chain: KeyChain, *, again: bool = False) -> Attachment:
        """Holds everything that was found and makes room for everything else; see `Planner.attach`.

        Args:
            plan: what to attach.
            found: what its spans find in the caches now.
            chain: makes the keys of what will be registered.
            again: whether what it finds was counted when the prompt was attached before.
        """
        need = self._need(plan, found)
        for here in found:
            self._prefix.hold(_held(here))
            self._prefix.pool.retain(entry.block_id for entry in _held(here))
        known: dict[Key, Chunk] = {here.chunk.key: here.chunk for here in found if here.chunk is not None}
        for chunk in known.values():
            self._chunks.hold(chunk)
        held, spans, copies = dict(known), list[AttachedSpan](), list[BlockCopy]()
        try:
            self._room.make(need)
            for span, here in zip(plan.spans, found, strict=True):
                if span.is_chunk:
                    spans.append(self._attach_chunk(plan, span, held, again))
                else:
                    spans.append(self._attach_prefix(plan, span, here, copies, again))
        except BaseException:
            self._detach(spans, found, held, known)
            raise
        for here in found:
            for entry in _held(here):
                entry.hits += not again
            if here.source is not None:
                self._prefix.leave((here.source,))  # the step copies it before anything is written
        for chunk in known.values():
            self._chunks.pin_if_kept(chunk)
        return Attachment(plan.layout, plan.salt, plan.tenant, spans, chain, copies)

    def _need(self, plan: Plan, found: Sequence[Found]) -> Need:
        """What the plan takes; where there is no room to hold blocks while they are copied, none are."""
        try:
            return self._room.check(plan, found)
        except OutOfBlocks:
            if all(here.source is None for here in found):
                raise
            for here in found:
                here.source, here.num_copied = None, 0
            return self._room.check(plan, found)

    def _detach(
        self, spans: Sequence[AttachedSpan], found: Sequence[Found], held: dict[Key, Chunk], known: dict[Key, Chunk]
    ) -> None:
        """Undoes an attach that failed half way."""
        for span in spans:
            if span.chunk is None:
                span.table.release()
        for here in found[len(spans) :]:
            self._prefix.pool.release([entry.block_id for entry in _held(here)])
        for here in found:
            self._prefix.leave(_held(here))
        for key, chunk in held.items():
            if key not in known:
                self._chunks.abandon(chunk)
            self._chunks.leave(chunk)

    def _attach_chunk(self, plan: Plan, span: SpanPlan, held: dict[Key, Chunk], again: bool) -> AttachedSpan:
        chunk = held.get(span.key)
        is_owner, has_twin = chunk is None, False
        if chunk is None:
            start = plan.layout.spans[span.index].start
            chunk = self._chunks.create(
                span.key, span.root, span.tokens, start, plan.salt, plan.tenant, identity=span.identity
            )
            self._chunks.hold(chunk)
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
            chunk.priority = priority  # it is held, so it has no place in line that this could change
        action: Action = "compute" if is_owner else ("reuse" if chunk.is_ready else "wait")
        return AttachedSpan(
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

    def _attach_prefix(
        self, plan: Plan, span: SpanPlan, here: Found, copies: list[BlockCopy], again: bool
    ) -> AttachedSpan:
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
        return AttachedSpan(
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


def _held(here: Found) -> list[PrefixEntry]:
    """The prefix entries that attaching holds: those that it shares, and the one that is copied."""
    return here.entries if here.source is None else [*here.entries, here.source]
