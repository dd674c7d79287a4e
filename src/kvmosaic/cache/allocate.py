"""Allocation of plans, all or nothing: the capacity check, eviction until a plan fits, and the allocator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmosaic.cache.allocation import Allocation, SpanAllocation
from kvmosaic.cache.block_pool import BlockPool
from kvmosaic.cache.block_table import BlockCopy, BlockTable
from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.groups import BlockCount, SharedStart, Twin
from kvmosaic.cache.keys import Key, KeyChain
from kvmosaic.cache.plan import Action, CacheHit, Plan, SpanPlan, is_closed
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.prefix_entry import PrefixEntry
from kvmosaic.cache.statistics import Counters
from kvmosaic.cache.tenants import TenantAccount
from kvmosaic.errors import ChunkCacheFull, OutOfBlocks, QuotaExceeded, QuotaInUse, RequestTooLarge
from kvmosaic.prompt import SegmentKind


@dataclass(frozen=True, slots=True)
class BlockDemand:
    """Demand of a plan: the blocks and chunks that it allocates."""

    request_blocks: int
    chunk_blocks: int
    num_chunks: int
    """New chunks."""
    tenant: str
    """The tenant they are charged to."""


class CapacityCheck:
    """Capacity check of plans: checks first and evicts second, so that a rejected plan leaves both caches unchanged."""

    def __init__(self, request_pool: BlockPool, prefix: PrefixCache, chunks: ChunkIndex) -> None:
        self._request_pool = request_pool
        self._prefix = prefix
        self._chunks = chunks

    def check(self, plan: Plan, found: Sequence[CacheHit]) -> BlockDemand:
        """The demand of a plan, given its cache hits.

        Raises:
            RequestTooLarge: more blocks than the request pool has.
            ChunkCacheFull: the prompt's chunks would not fit next to the pinned ones, even if nothing else were cached;
                QuotaExceeded, if the tenant's quota is the limit.
            OutOfBlocks: they would fit if running requests held fewer blocks; retry later. QuotaInUse, if these
                requests are of this tenant and its quota is the limit, independent of other tenants.
        """
        request_blocks = self._check_request(plan, found)
        present, missing = held_chunks(found), self._missing_blocks(plan, found)
        chunk_blocks = sum(missing.values())
        if missing:
            account, held = self._chunks.account(plan.tenant), self._chunks.shared.count(present)
            self._check_quota(account, held, chunk_blocks)
            self._check_possible(present, held, len(missing), chunk_blocks)
            _check_quota_now(account, held, chunk_blocks)
            self._check_now(present, held, len(missing), chunk_blocks)
        return BlockDemand(request_blocks, chunk_blocks, len(missing), plan.tenant)

    def _missing_blocks(self, plan: Plan, found: Sequence[CacheHit]) -> dict[Key, int]:
        """The new blocks of each missing chunk."""
        missing: dict[Key, int] = {}
        for span, here in zip(plan.spans, found, strict=True):
            if span.is_chunk and here.chunk is None:
                missing.setdefault(span.key, self._chunks.pool.blocks_for(span.num_tokens) - here.num_shared)
        return missing

    def fits_surely(self, tenant: str, num_chunks: int, num_blocks: int) -> bool:
        """Whether so many new chunks could be in the cache together with all pinned ones."""
        chunks, account = self._chunks, self._chunks.account(tenant)
        limits = [(account, account.quota_blocks), (chunks.total, chunks.pool.num_blocks)]
        has_room = all(limit is None or num_blocks + used.num_pinned_blocks <= limit for used, limit in limits)
        return has_room and num_chunks + chunks.total.num_pinned <= chunks.max_chunks

    def check_chunks(self, plan: Plan, found: Sequence[CacheHit]) -> None:
        """Checks whether the chunks of a plan could be in the cache together, if nothing else but pins were there.

        Raises:
            ChunkCacheFull, QuotaExceeded: see `check`.
        """
        _give_up_shared(found)
        if missing := self._missing_blocks(plan, found):
            present, chunk_blocks = held_chunks(found), sum(missing.values())
            held = self._chunks.shared.count(present)
            self._check_quota(self._chunks.account(plan.tenant), held, chunk_blocks)
            self._check_possible(present, held, len(missing), chunk_blocks)

    def num_chunk_blocks(self, plan: Plan, found: Sequence[CacheHit]) -> int:
        """Blocks of the chunks of a plan, shared ones counted once."""
        return sum(self._missing_blocks(plan, found).values()) + self._chunks.shared.count(held_chunks(found)).total

    def fit(self, plan: Plan, found: Sequence[CacheHit]) -> BlockDemand:
        """The demand of a plan, with as much reuse as there is room for; see `check`.

        Copying a block takes a free one, and a chunk whose first blocks are shared cannot be evicted meanwhile. Where
        that is too much, `found` loses these hits.
        """
        for give_up in (_give_up_copies, _give_up_shared):
            try:
                return self.check(plan, found)
            except (OutOfBlocks, ChunkCacheFull, QuotaExceeded):
                give_up(found)
        return self.check(plan, found)

    def make(self, need: BlockDemand) -> None:
        """Evicts until a checked demand fits; every cache hit must be acquired by now.

        For its quota, a tenant evicts its own chunks; for the pool, chunks of all tenants are evicted in common order.
        """
        self.make_request_blocks(need.request_blocks)
        if not need.num_chunks:
            return
        pool, chunks = self._chunks.pool, self._chunks
        account = chunks.account(need.tenant)
        while not account.has_room(need.chunk_blocks):
            evicted = chunks.evict_one(account)
            assert evicted is not None, "the check before has counted the tenant's idle chunks"
        while pool.num_free < need.chunk_blocks or len(chunks) + need.num_chunks > chunks.max_chunks:
            evicted = chunks.evict_one()
            assert evicted is not None, "the check before has counted the idle chunks"

    def make_request_blocks(self, count: int) -> None:
        """Evicts prefix blocks until `count` blocks of the request pool are free.

        Raises:
            OutOfBlocks: evicting the whole prefix cache would not suffice; nothing has changed.
        """
        pool = self._request_pool
        missing = count - pool.num_free
        if missing > self._prefix.num_idle:
            raise _refusal(count, pool, self._prefix.num_idle)
        if missing > 0:
            self._prefix.evict(missing)

    def _check_request(self, plan: Plan, found: Sequence[CacheHit]) -> int:
        pool = self._request_pool
        spans = [(span, here) for span, here in zip(plan.spans, found, strict=True) if not span.is_chunk]
        total = sum(pool.blocks_for(span.num_tokens) for span, _ in spans)
        if total > pool.num_blocks:
            raise RequestTooLarge(
                f"the prompt needs {total} blocks of {pool.block_size} tokens outside its chunks and the pool "
                f"{pool.name!r} has {pool.num_blocks}; shorten the prompt or give the request cache more memory"
            )
        needed = total - sum(len(here.entries) for _, here in spans)
        held = (entry for _, here in spans for entry in (*here.entries, here.source) if entry is not None)
        reused = {entry.block_id for entry in held if entry.ref_count == 0}
        idle = self._prefix.num_idle - len(reused)
        if needed > pool.num_free + idle:
            raise _refusal(needed, pool, idle)
        return needed

    def _check_quota(self, account: TenantAccount, held: BlockCount, missing_blocks: int) -> None:
        if account.quota_blocks is None:
            return
        pinned_blocks = account.num_pinned_blocks - held.pinned
        needed = missing_blocks + held.total
        if needed + pinned_blocks > account.quota_blocks:
            raise QuotaExceeded(
                f"the chunks of this prompt need {needed} blocks of {self._chunks.pool.block_size} tokens; the quota "
                f"of this tenant is {account.quota_blocks} ({account.quota_bytes} bytes), of which {pinned_blocks} are "
                "pinned for other documents; unpin documents, ask with fewer, or have the quota raised"
            )

    def _check_possible(
        self, present: Sequence[Chunk], held: BlockCount, num_missing: int, missing_blocks: int
    ) -> None:
        chunks, pool = self._chunks, self._chunks.pool
        pinned_blocks = chunks.total.num_pinned_blocks - held.pinned
        needed = missing_blocks + held.total
        if needed + pinned_blocks > pool.num_blocks:
            raise ChunkCacheFull(
                f"the chunks of this prompt need {needed} blocks of {pool.block_size} tokens; the chunk cache has "
                f"{pool.num_blocks}, of which {pinned_blocks} are pinned by others; "
                "raise the capacity, unpin chunks, or ask with fewer documents"
            )
        count, pinned = num_missing + len(present), chunks.total.num_pinned - sum(c.pinned for c in present)
        if count + pinned > chunks.max_chunks:
            raise ChunkCacheFull(
                f"this prompt has {count} different chunks; max_chunks is {chunks.max_chunks}, of which {pinned} are "
                "pinned by others; raise max_chunks, unpin chunks, or ask with fewer documents"
            )

    def _check_now(self, present: Sequence[Chunk], held: BlockCount, num_missing: int, missing_blocks: int) -> None:
        chunks, pool = self._chunks, self._chunks.pool
        idle_blocks = chunks.total.num_idle_blocks - held.idle
        if missing_blocks > pool.num_free + idle_blocks:
            raise _refusal(missing_blocks, pool, idle_blocks)
        too_many = len(chunks) + num_missing - chunks.max_chunks
        idle = chunks.total.num_idle - sum(chunk.is_evictable for chunk in present)
        if too_many > idle:
            raise OutOfBlocks(
                f"{num_missing} chunks are missing, {len(chunks)} are cached and max_chunks is {chunks.max_chunks}; "
                f"{idle} may be evicted; wait until running requests end or raise max_chunks"
            )


def held_chunks(found: Sequence[CacheHit]) -> list[Chunk]:
    """The chunks that must not be evicted for a plan: those it reads, and those whose first blocks it shares."""
    read = [here.chunk for here in found if here.chunk is not None]
    sources = (here.shared.source for here in found if here.shared is not None)
    return list(dict.fromkeys(read + [source for source in sources if isinstance(source, Chunk)]))


def _give_up_copies(found: Sequence[CacheHit]) -> None:
    for here in found:
        if here.source is not None and here.state is not None:  # it is the one after the copied tokens
            here.end_with_a_state()
        here.source, here.num_copied = None, 0


def _give_up_shared(found: Sequence[CacheHit]) -> None:
    """Shares only with chunks that are there anyway: pinned ones, and those of the prompt."""
    for here in found:
        source = None if here.shared is None else here.shared.source
        if not (isinstance(source, Chunk) and source.pinned):
            here.shared = here.shared_inside


def _check_quota_now(account: TenantAccount, held: BlockCount, missing_blocks: int) -> None:
    idle_blocks = account.num_idle_blocks - held.idle
    if not account.has_room(missing_blocks - idle_blocks):
        raise QuotaInUse(
            f"{missing_blocks} blocks are missing; of the {account.quota_blocks} that this tenant may have, "
            f"{account.num_blocks} are taken and {idle_blocks} of these may be evicted; wait until its running "
            "requests end, or have the quota raised"
        )


def _refusal(needed: int, pool: BlockPool, idle: int) -> OutOfBlocks:
    return OutOfBlocks(
        f"the pool {pool.name!r} cannot give {needed} blocks: of {pool.num_blocks} {pool.num_free} are free and "
        f"{idle} may be evicted; wait until running requests end, or give the pool more memory",
        pool=pool.name,
        num_missing=needed - pool.num_free - idle,
    )


class Allocator:
    """All-or-nothing allocator: acquires cache hits first, so that evicting for the rest cannot free them."""

    def __init__(self, prefix: PrefixCache, chunks: ChunkIndex, capacity: CapacityCheck, counters: Counters) -> None:
        self._prefix = prefix
        self._chunks = chunks
        self._capacity = capacity
        self._counters = counters

    def allocate(self, plan: Plan, found: Sequence[CacheHit], chain: KeyChain, *, again: bool = False) -> Allocation:
        """Acquires everything that was found and allocates blocks for the rest; see `KVCache.allocate`.

        Args:
            plan: what to allocate.
            found: the current cache hits of its spans.
            chain: makes the keys of blocks and chunks to register.
            again: whether its hits were already counted, because the prompt was allocated before.
        """
        need = self._capacity.fit(plan, found)
        for here in found:
            self._prefix.acquire(_held(here))
            self._prefix.pool.retain(entry.block_id for entry in _held(here))
        known: dict[Key, Chunk] = {here.chunk.key: here.chunk for here in found if here.chunk is not None}
        acquired = held_chunks(found)
        for chunk in acquired:
            self._chunks.acquire(chunk)
        held, spans, copies = dict(known), list[SpanAllocation](), list[BlockCopy]()
        try:
            self._capacity.make(need)
            for span, here in zip(plan.spans, found, strict=True):
                if span.is_chunk:
                    spans.append(self._allocate_chunk(plan, span, here, held, again))
                else:
                    spans.append(self._allocate_prefix(plan, span, here, copies, again))
        except BaseException:
            self._detach(spans, found, held, acquired)
            raise
        for here in found:
            for entry in _held(here):
                entry.hits += not again
                if entry.state is not None:
                    self._prefix.states.use(entry)
            if here.source is not None:
                self._prefix.release((here.source,))  # the step copies it before anything is written
        for chunk in acquired:
            if chunk.key not in known:
                self._chunks.release(chunk)  # its first blocks belong to a new chunk, too
        for chunk in known.values():
            self._chunks.pin_if_named(chunk)
        return Allocation(plan.layout, plan.salt, plan.tenant, spans, chain, copies)

    def _detach(
        self,
        spans: Sequence[SpanAllocation],
        found: Sequence[CacheHit],
        held: dict[Key, Chunk],
        acquired: Sequence[Chunk],
    ) -> None:
        """Undoes an allocation that failed half way."""
        for span in spans:
            if span.chunk is None:
                span.table.release()
        for here in found[len(spans) :]:
            self._prefix.pool.release([entry.block_id for entry in _held(here)])
        for here in found:
            self._prefix.release(_held(here))
        for chunk in held.values():
            if chunk not in acquired:
                self._chunks.abandon(chunk)
                self._chunks.release(chunk)
        for chunk in acquired:
            self._chunks.release(chunk)

    def _allocate_chunk(
        self, plan: Plan, span: SpanPlan, here: CacheHit, held: dict[Key, Chunk], again: bool
    ) -> SpanAllocation:
        chunk = held.get(span.key)
        is_owner, was_evicted = chunk is None, False
        twin: Twin = ""
        if chunk is None:
            was_evicted = self._chunks.was_evicted(span.key)
            start, shared = plan.layout.spans[span.index].start, None
            if here.shared is not None:
                source = here.shared.source
                source = source if isinstance(source, Chunk) else held[source.key]
                shared = SharedStart(source, here.num_shared)
            chunk = self._chunks.create(
                span.key, span.root, span.tokens, start, plan.salt, plan.tenant, identity=span.identity, shared=shared
            )
            self._chunks.acquire(chunk)
            held[span.key] = chunk
            if (system := _system_seen(plan, span.index)) is not None:
                twin = self._chunks.same_text.twin(plan.tenant, plan.salt, span.tokens, system)
                self._chunks.same_text.add(chunk, system)
        else:
            chunk.hits += not again
        if is_owner or not again:
            num_reused = chunk.num_kept if is_owner else span.num_tokens
            self._counters.count_chunk(num_reused, span.distance, is_hit=not is_owner)
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
            twin=twin,
            was_evicted=was_evicted,
            awaited_start=is_owner and chunk.lacks_start,
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
            state=here.state,
        )


def _held(here: CacheHit) -> list[PrefixEntry]:
    """The prefix entries that an allocation acquires: the shared ones, and the copied one."""
    return here.entries if here.source is None else [*here.entries, here.source]


def _system_seen(plan: Plan, index: int) -> Key | None:
    """Key of the system text that a chunk saw, empty without one; None: it saw other chunks, or has its own place."""
    seen = [view.span for view in plan.layout.spans[index].views]
    if plan.layout.rules.takes_offsets or any(plan.spans[span].is_chunk for span in seen):
        return None
    return next((plan.spans[span].identity for span in seen if plan.spans[span].kind is SegmentKind.SYSTEM), Key(b""))
