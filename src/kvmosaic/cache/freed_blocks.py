"""Blocks that releasing allocations would free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvmosaic.cache.allocation import Allocation
from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.chunk import Chunk


def freed_by(allocations: Iterable[Allocation], request_pool: BlockPool) -> dict[str, int]:
    """By pool: the blocks that would be free or evictable if all of these allocations were released.

    Blocks with other holders are not counted, nor are pinned chunks.
    """
    references: Counter[BlockId] = Counter()
    holders: Counter[Chunk] = Counter()
    cached: set[BlockId] = set()
    for allocation in allocations:
        for span in allocation.spans:
            if span.chunk is None:
                references.update(span.table.block_ids)
                cached.update(entry.block_id for entry in span.entries if not entry.is_dropped)
        holders.update(allocation.held_chunks())
    request_blocks = sum(
        request_pool.reference_count(block_id) == count + (block_id in cached)  # the cache's own reference
        for block_id, count in references.items()
    )
    chunks = (chunk for chunk, count in holders.items() if chunk.ref_count == count and not chunk.pinned)
    return {"request": request_blocks, "chunk_cache": sum(len(chunk.block_ids) for chunk in chunks)}


def own_blocks(allocation: Allocation) -> int:
    """The first block of the last span with no other holder; all later ones are this allocation's own."""
    span = allocation.last
    cached = {entry.block_id for entry in span.entries if not entry.is_dropped}
    pool, first = span.table.pool, len(span.table.block_ids)
    for block_id in reversed(span.table.block_ids):
        if pool.reference_count(block_id) != 1 + (block_id in cached):
            break
        first -= 1
    return first
