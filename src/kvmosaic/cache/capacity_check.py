"""The capacity check: whether a plan fits into the pools, and evicting until it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmosaic.cache.block_pool import BlockPool
from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import Key
from kvmosaic.cache.lookup import CacheHit
from kvmosaic.cache.plan import Plan, SpanPlan
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.tenant_account import TenantAccount
from kvmosaic.errors import ChunkCacheFull, OutOfBlocks, QuotaExceeded, QuotaInUse, RequestTooLarge


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
        missing: dict[Key, SpanPlan] = {}
        present: dict[Key, Chunk] = {}
        for span, here in zip(plan.spans, found, strict=True):
            if here.chunk is not None:
                present[span.key] = here.chunk
            elif span.is_chunk:
                missing[span.key] = span
        chunk_blocks = sum(self._chunks.pool.blocks_for(span.num_tokens) for span in missing.values())
        if missing:
            chunks, account = list(present.values()), self._chunks.account(plan.tenant)
            self._check_quota(account, chunks, chunk_blocks)
            self._check_possible(chunks, len(missing), chunk_blocks)
            _check_quota_now(account, chunks, chunk_blocks)
            self._check_now(chunks, len(missing), chunk_blocks)
        return BlockDemand(request_blocks, chunk_blocks, len(missing), plan.tenant)

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

    def _check_quota(self, account: TenantAccount, present: Sequence[Chunk], missing_blocks: int) -> None:
        if account.quota_blocks is None:
            return
        pinned_here = sum(len(chunk.block_ids) for chunk in present if chunk.pinned)
        pinned_blocks = account.num_pinned_blocks - pinned_here
        needed = missing_blocks + sum(len(chunk.block_ids) for chunk in present)
        if needed + pinned_blocks > account.quota_blocks:
            raise QuotaExceeded(
                f"the chunks of this prompt need {needed} blocks of {self._chunks.pool.block_size} tokens; the quota "
                f"of this tenant is {account.quota_blocks} ({account.quota_bytes} bytes), of which {pinned_blocks} are "
                "pinned for other documents; unpin documents, ask with fewer, or have the quota raised"
            )

    def _check_possible(self, present: Sequence[Chunk], num_missing: int, missing_blocks: int) -> None:
        chunks, pool = self._chunks, self._chunks.pool
        pinned_here = [chunk for chunk in present if chunk.pinned]
        pinned_blocks = chunks.total.num_pinned_blocks - sum(len(chunk.block_ids) for chunk in pinned_here)
        needed = missing_blocks + sum(len(chunk.block_ids) for chunk in present)
        if needed + pinned_blocks > pool.num_blocks:
            raise ChunkCacheFull(
                f"the chunks of this prompt need {needed} blocks of {pool.block_size} tokens; the chunk cache has "
                f"{pool.num_blocks}, of which {pinned_blocks} are pinned by others; "
                "raise the capacity, unpin chunks, or ask with fewer documents"
            )
        count, pinned = num_missing + len(present), chunks.total.num_pinned - len(pinned_here)
        if count + pinned > chunks.max_chunks:
            raise ChunkCacheFull(
                f"this prompt has {count} different chunks; max_chunks is {chunks.max_chunks}, of which {pinned} are "
                "pinned by others; raise max_chunks, unpin chunks, or ask with fewer documents"
            )

    def _check_now(self, present: Sequence[Chunk], num_missing: int, missing_blocks: int) -> None:
        chunks, pool = self._chunks, self._chunks.pool
        idle_here = [chunk for chunk in present if chunk.is_evictable]
        idle_blocks = chunks.total.num_idle_blocks - sum(len(chunk.block_ids) for chunk in idle_here)
        if missing_blocks > pool.num_free + idle_blocks:
            raise _refusal(missing_blocks, pool, idle_blocks)
        too_many = len(chunks) + num_missing - chunks.max_chunks
        idle = chunks.total.num_idle - len(idle_here)
        if too_many > idle:
            raise OutOfBlocks(
                f"{num_missing} chunks are missing, {len(chunks)} are cached and max_chunks is {chunks.max_chunks}; "
                f"{idle} may be evicted; wait until running requests end or raise max_chunks"
            )


def _check_quota_now(account: TenantAccount, present: Sequence[Chunk], missing_blocks: int) -> None:
    idle_here = sum(len(chunk.block_ids) for chunk in present if chunk.is_evictable)
    idle_blocks = account.num_idle_blocks - idle_here
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
