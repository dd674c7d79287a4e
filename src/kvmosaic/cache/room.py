"""Room: whether a plan fits into the pools, and making it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmosaic.cache.block_pool import BlockPool
from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import Key
from kvmosaic.cache.lookup import Found
from kvmosaic.cache.plan import Plan, SpanPlan
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.errors import ChunkCacheFull, OutOfBlocks, RequestTooLarge


@dataclass(frozen=True, slots=True)
class Need:
    """What a plan takes from the pools."""

    request_blocks: int
    chunk_blocks: int
    num_chunks: int
    """Chunks that are new to the index."""


class Room:
    """Checks first and evicts second, so that a refusal leaves both caches exactly as they were."""

    def __init__(self, request_pool: BlockPool, prefix: PrefixCache, chunks: ChunkIndex) -> None:
        self._request_pool = request_pool
        self._prefix = prefix
        self._chunks = chunks

    def check(self, plan: Plan, found: Sequence[Found]) -> Need:
        """What the plan needs, given what was found.

        Raises:
            RequestTooLarge: more blocks than the request pool has.
            ChunkCacheFull: the prompt's chunks would not fit next to the pinned ones, even if nothing else were cached.
            OutOfBlocks: they would fit if running requests did not hold so much; try again later.
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
            self._check_possible(list(present.values()), len(missing), chunk_blocks)
            self._check_now(list(present.values()), len(missing), chunk_blocks)
        return Need(request_blocks, chunk_blocks, len(missing))

    def make(self, need: Need) -> None:
        """Evicts until what was checked fits; everything found must be held by now."""
        self.make_request_blocks(need.request_blocks)
        if not need.num_chunks:
            return
        pool, chunks = self._chunks.pool, self._chunks
        while pool.num_free < need.chunk_blocks or len(chunks) + need.num_chunks > chunks.max_chunks:
            evicted = chunks.evict_one()
            assert evicted is not None, "the check before has counted the idle chunks"

    def make_request_blocks(self, count: int) -> None:
        """Evicts prefix blocks until `count` blocks of the request pool are free.

        Raises:
            OutOfBlocks: even without the prefix cache there are fewer; nothing has changed.
        """
        pool = self._request_pool
        missing = count - pool.num_free
        if missing > self._prefix.num_idle:
            raise OutOfBlocks(_refusal(count, pool, self._prefix.num_idle))
        if missing > 0:
            self._prefix.evict(missing)

    def _check_request(self, plan: Plan, found: Sequence[Found]) -> int:
        pool = self._request_pool
        spans = [(span, here) for span, here in zip(plan.spans, found, strict=True) if not span.is_chunk]
        total = sum(pool.blocks_for(span.num_tokens) for span, _ in spans)
        if total > pool.num_blocks:
            raise RequestTooLarge(
                f"the prompt needs {total} blocks of {pool.block_size} tokens outside its chunks and the pool "
                f"{pool.name!r} has {pool.num_blocks}; shorten the prompt or give the request cache more memory"
            )
        needed = total - sum(len(here.entries) for _, here in spans)
        reused = {entry.block_id for _, here in spans for entry in here.entries if entry.users == 0}
        idle = self._prefix.num_idle - len(reused)
        if needed > pool.num_free + idle:
            raise OutOfBlocks(_refusal(needed, pool, idle))
        return needed

    def _check_possible(self, present: Sequence[Chunk], num_missing: int, missing_blocks: int) -> None:
        chunks, pool = self._chunks, self._chunks.pool
        pinned_here = [chunk for chunk in present if chunk.pinned]
        pinned_blocks = chunks.num_pinned_blocks - sum(len(chunk.block_ids) for chunk in pinned_here)
        needed = missing_blocks + sum(len(chunk.block_ids) for chunk in present)
        if needed + pinned_blocks > pool.num_blocks:
            raise ChunkCacheFull(
                f"the chunks of this prompt need {needed} blocks of {pool.block_size} tokens; the chunk cache has "
                f"{pool.num_blocks}, of which {pinned_blocks} are pinned by others; "
                "raise the capacity, unpin chunks, or ask with fewer documents"
            )
        count, pinned = num_missing + len(present), chunks.num_pinned - len(pinned_here)
        if count + pinned > chunks.max_chunks:
            raise ChunkCacheFull(
                f"this prompt has {count} different chunks; max_chunks is {chunks.max_chunks}, of which {pinned} are "
                "pinned by others; raise max_chunks, unpin chunks, or ask with fewer documents"
            )

    def _check_now(self, present: Sequence[Chunk], num_missing: int, missing_blocks: int) -> None:
        chunks, pool = self._chunks, self._chunks.pool
        idle_here = [chunk for chunk in present if chunk.is_evictable]
        idle_blocks = chunks.num_idle_blocks - sum(len(chunk.block_ids) for chunk in idle_here)
        if missing_blocks > pool.num_free + idle_blocks:
            raise OutOfBlocks(_refusal(missing_blocks, pool, idle_blocks))
        too_many = len(chunks) + num_missing - chunks.max_chunks
        idle = chunks.num_idle - len(idle_here)
        if too_many > idle:
            raise OutOfBlocks(
                f"{num_missing} chunks are missing, {len(chunks)} are cached and max_chunks is {chunks.max_chunks}; "
                f"{idle} may be evicted; wait until running requests end or raise max_chunks"
            )


def _refusal(needed: int, pool: BlockPool, idle: int) -> str:
    return (
        f"the pool {pool.name!r} cannot give {needed} blocks: of {pool.num_blocks} {pool.num_free} are free and "
        f"{idle} may be evicted; wait until running requests end, or give the pool more memory"
    )
