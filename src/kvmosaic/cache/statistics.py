"""Statistics of the caches, and the block map: the state of every block of both pools."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import NoReturn

from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.prefix_cache import PrefixCache

_OTHER_NAMES = {"lookup_count": "lookups", "hit_count": "hits", "miss_count": "misses"}


@dataclass(frozen=True, slots=True)
class ChunkCacheStats:
    """A snapshot of the caches; counters run since the KV cache was made."""

    lookups: int
    """Chunk spans of allocated prompts; a prompt that waits for blocks counts once, however often it retries."""
    hits: int
    """Of these, the hits: ready, being computed, or in a tier."""
    misses: int
    cached_chunks: int
    """Chunks in the index, those being computed included."""
    pinned_chunks: int
    used_blocks: int
    """Blocks of the chunk pool with at least one reference."""
    total_blocks: int
    shared_blocks: int
    """Blocks of the chunk pool with more than one reference: those of chunks in the cache and of running requests."""
    sharing_ratio: float
    """References per used block of the chunk pool; 1.0 when nothing is used."""
    evictions: int
    """Chunks evicted for capacity."""
    average_lookup_ms: float
    """Milliseconds to find one chunk: hash its tokens and look it up in the index."""
    average_allocate_ms: float
    """Milliseconds to allocate one prompt with all of its spans."""
    average_compute_ms: float
    """Milliseconds to compute one missing chunk, as reported by the engine."""
    prefix_lookup_tokens: int
    """Tokens of allocated spans outside the chunk cache."""
    prefix_hit_tokens: int
    """Of these, hits in the prefix cache."""
    prefix_blocks: int
    """Blocks in the prefix cache."""
    prefix_evictions: int
    request_used_blocks: int
    request_total_blocks: int
    request_shared_blocks: int
    planned_chunks: int
    """Chunk lookups, once per try: a prompt that waits for blocks looks up again."""
    lookup_seconds: float
    """Total seconds of all lookups."""
    allocates: int
    """Allocated prompts."""
    allocate_seconds: float
    computes: int
    """Missing chunks that were computed, as reported by the engine."""
    compute_seconds: float
    reused_tokens: int
    """Tokens of chunk hits, and those kept of an earlier text, read at the position where they were computed."""
    moved_tokens: int
    """The same, read at a distance."""
    computed_tokens: int
    """Tokens of chunks that were computed."""
    loaded_chunks: int
    """Chunks loaded from a tier instead of computed."""
    loaded_tokens: int
    """Their tokens."""
    idle_blocks: int
    """Evictable blocks of the chunk pool."""
    request_idle_blocks: int
    """Evictable blocks of the request pool."""

    def __getattr__(self, name: str) -> NoReturn:
        hint = f"; here it is {_OTHER_NAMES[name]!r}" if name in _OTHER_NAMES else ""
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r:.80}{hint}")

    def summary(self) -> str:
        """Its main figures as key=value, for a log."""
        return (
            f"lookups={self.lookups} hits={self.hits} hit_rate={self.hit_rate:.3f} chunks={self.cached_chunks} "
            f"pinned={self.pinned_chunks} used_blocks={self.used_blocks} total_blocks={self.total_blocks} "
            f"evictions={self.evictions} reused_tokens={self.reused_tokens} moved_tokens={self.moved_tokens} "
            f"computed_tokens={self.computed_tokens} loaded_tokens={self.loaded_tokens}"
        )

    @property
    def hit_rate(self) -> float:
        """Hits per lookup; 0.0 before the first one."""
        return self.hits / self.lookups if self.lookups else 0.0


@dataclass(slots=True)
class Counters:
    """Running counters of the KV cache."""

    reused_chunk_tokens: int = 0
    moved_chunk_tokens: int = 0
    computed_chunk_tokens: int = 0
    loaded_chunks: int = 0
    loaded_chunk_tokens: int = 0
    lookups: int = 0
    hits: int = 0
    planned_chunks: int = 0
    lookup_seconds: float = 0.0
    allocates: int = 0
    allocate_seconds: float = 0.0
    computes: int = 0
    compute_ms: float = 0.0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0

    def count_chunk(self, num_reused: int, distance: int, *, is_hit: bool) -> None:
        """Counts one allocated chunk span."""
        self.lookups += 1
        self.hits += is_hit
        self.moved_chunk_tokens += num_reused if distance else 0
        self.reused_chunk_tokens += 0 if distance else num_reused


def snapshot(counters: Counters, chunks: ChunkIndex, prefix: PrefixCache, request_pool: BlockPool) -> ChunkCacheStats:
    """A snapshot of the statistics."""
    pool = chunks.pool
    return ChunkCacheStats(
        lookups=counters.lookups,
        hits=counters.hits,
        misses=counters.lookups - counters.hits,
        cached_chunks=len(chunks),
        pinned_chunks=chunks.total.num_pinned,
        used_blocks=pool.num_used,
        total_blocks=pool.num_blocks,
        shared_blocks=pool.num_shared,
        sharing_ratio=pool.num_references / pool.num_used if pool.num_used else 1.0,
        evictions=chunks.num_evictions,
        average_lookup_ms=_average(counters.lookup_seconds * 1e3, counters.planned_chunks),
        average_allocate_ms=_average(counters.allocate_seconds * 1e3, counters.allocates),
        average_compute_ms=_average(counters.compute_ms, counters.computes),
        prefix_lookup_tokens=counters.prefix_lookup_tokens,
        prefix_hit_tokens=counters.prefix_hit_tokens,
        prefix_blocks=len(prefix),
        prefix_evictions=prefix.num_evictions,
        request_used_blocks=request_pool.num_used,
        request_total_blocks=request_pool.num_blocks,
        request_shared_blocks=request_pool.num_shared,
        planned_chunks=counters.planned_chunks,
        lookup_seconds=counters.lookup_seconds,
        allocates=counters.allocates,
        allocate_seconds=counters.allocate_seconds,
        computes=counters.computes,
        compute_seconds=counters.compute_ms / 1e3,
        reused_tokens=counters.reused_chunk_tokens,
        moved_tokens=counters.moved_chunk_tokens,
        computed_tokens=counters.computed_chunk_tokens,
        loaded_chunks=counters.loaded_chunks,
        loaded_tokens=counters.loaded_chunk_tokens,
        idle_blocks=chunks.total.num_idle_blocks,
        request_idle_blocks=prefix.num_idle,
    )


def _average(total: float, count: int) -> float:
    return total / count if count else 0.0


class BlockState(IntEnum):
    """State of one block."""

    FREE = 0
    IDLE = 1
    """Cached, without readers: evictable."""
    IN_USE = 2
    """Ref count 1, besides the cache's."""
    SHARED = 3
    """Ref count 2 or more, besides the cache's."""
    PINNED = 4
    """Of a pinned chunk, in use or not."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A snapshot of both pools: byte i is the `BlockState` of block i."""

    request: bytes
    chunk_cache: bytes


def _by_references(kept: bool) -> bytes:
    """State per ref count (3: three or more), for blocks with or without a cache reference."""
    free, idle, used, shared = BlockState.FREE, BlockState.IDLE, BlockState.IN_USE, BlockState.SHARED
    return bytes((free, idle, used, shared) if kept else (free, used, shared, shared))


def _up_to_three(references: array[int]) -> bytes:
    """Every ref count, at most 3, as a byte."""
    data, width = references.tobytes(), references.itemsize
    pieces = [data[index::width] for index in range(width)]
    lowest = pieces.pop(0 if sys.byteorder == "little" else -1)
    if any(piece.count(0) < len(piece) for piece in pieces):  # more than 255 readers of one block
        return bytes(map(min, references, repeat(3)))
    return lowest.translate(bytes(min(count, 3) for count in range(256)))


def states_of(
    pool: BlockPool,
    *,
    kept: Iterable[BlockId] | None,
    pinned: Iterable[BlockId] = (),
    holders: Iterable[tuple[BlockId, int]] = (),
) -> bytes:
    """The state of every block of a pool, in one pass over it.

    Args:
        pool: the pool.
        kept: blocks with a cache reference besides those of readers; None: every used block.
        pinned: blocks of pinned chunks.
        holders: blocks with cache references of several chunks, and their number.
    """
    counts, by_references = _up_to_three(pool.references), _by_references(True)
    if kept is None:
        states = bytearray(counts.translate(by_references.ljust(256, b"\0")))
    else:
        states = bytearray(counts.translate(_by_references(False).ljust(256, b"\0")))
        for block_id in kept:
            states[block_id] = by_references[counts[block_id]]
    for block_id, count in holders:
        states[block_id] = by_references[min(pool.reference_count(block_id) - count, 2) + 1]
    for block_id in pinned:
        states[block_id] = BlockState.PINNED
    return bytes(states)
