"""What releasing attachments would make free, before anybody does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvmosaic.cache.attachment import Attachment
from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.chunk import Chunk


def freed_by(attachments: Iterable[Attachment], request_pool: BlockPool) -> dict[str, int]:
    """By pool: the blocks that would be free, or free to leave, if all of these attachments were released.

    What somebody else holds as well would not be, nor would pinned chunks.
    """
    references: Counter[BlockId] = Counter()
    holders: Counter[Chunk] = Counter()
    cached: set[BlockId] = set()
    for attachment in attachments:
        for span in attachment.spans:
            if span.chunk is None:
                references.update(span.table.block_ids)
                cached.update(entry.block_id for entry in span.entries if not entry.is_dropped)
        holders.update(attachment.held_chunks())
    request_blocks = sum(
        request_pool.reference_count(block_id) == count + (block_id in cached)  # the cache's own reference
        for block_id, count in references.items()
    )
    chunks = (chunk for chunk, count in holders.items() if chunk.users == count and not chunk.pinned)
    return {"request": request_blocks, "chunk_cache": sum(len(chunk.block_ids) for chunk in chunks)}


def own_blocks(attachment: Attachment) -> int:
    """The first block of the last span that nobody else holds; from it on, all are this attachment's own."""
    span = attachment.last
    cached = {entry.block_id for entry in span.entries if not entry.is_dropped}
    pool, first = span.table.pool, len(span.table.block_ids)
    for block_id in reversed(span.table.block_ids):
        if pool.reference_count(block_id) != 1 + (block_id in cached):
            break
        first -= 1
    return first
