"""Statistics of the chunk cache and the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.cache.block_pool import BlockPool
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.plan import SpanPlan
from kvmosaic.cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class ChunkCacheStats:
    """One moment of the caches; counters run since the KV cache was made."""

    lookups: int
    """Chunk spans of prompts that were allocated; a prompt that waits for room counts once, however often it tries."""
    hits: int
    """Of these, found ready, being computed, or in a tier."""
    misses: int
    cached_chunks: int
    """Chunks in the index, those being computed included."""
    pinned_chunks: int
    used_blocks: int
    """Blocks of the chunk pool with at least one reference."""
    total_blocks: int
    shared_blocks: int
    """Blocks of the chunk pool with more than one reference: the cache's and those of running requests."""
    sharing_ratio: float
    """References per used block of the chunk pool; 1.0 when nothing is used."""
    evictions: int
    """Chunks that left to make room."""
    average_lookup_ms: float
    """To find one chunk: hash its tokens and look into the index."""
    average_allocate_ms: float
    """To allocate one prompt with all of its spans."""
    average_compute_ms: float
    """To compute one missing chunk, as reported by the engine."""
    prefix_lookup_tokens: int
    """Tokens of allocated spans outside the chunk cache."""
    prefix_hit_tokens: int
    """Of these, found in the prefix cache."""
    prefix_blocks: int
    """Blocks that the prefix cache keeps."""
    prefix_evictions: int
    request_used_blocks: int
    request_total_blocks: int
    request_shared_blocks: int
    planned_chunks: int
    """Chunks that were looked up, once per try: a prompt that waits for room looks again."""
    lookup_seconds: float
    """All lookups together."""
    allocates: int
    """Prompts that were allocated."""
    allocate_seconds: float
    computes: int
    """Missing chunks that were computed, as reported by the engine."""
    compute_seconds: float
    reused_tokens: int
    """Tokens of chunks that were allocated without computing them and read where they were computed."""
    moved_tokens: int
    """The same, read at a distance."""
    computed_tokens: int
    """Tokens of chunks that were computed."""
    loaded_chunks: int
    """Chunks that were copied from a tier instead of being computed."""
    loaded_tokens: int
    """Their tokens."""
    idle_blocks: int
    """Used blocks of the chunk pool that eviction may free now."""
    request_idle_blocks: int
    """Used blocks of the request pool that eviction may free now."""

    @property
    def hit_rate(self) -> float:
        """Hits per lookup; 0.0 before the first one."""
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def prefix_hit_rate(self) -> float:
        """Prefix tokens found per token looked up; 0.0 before the first one."""
        return self.prefix_hit_tokens / self.prefix_lookup_tokens if self.prefix_lookup_tokens else 0.0


@dataclass(slots=True)
class Counters:
    """What the KV cache counts as it goes."""

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

    def count_chunk(self, span: SpanPlan, *, is_hit: bool) -> None:
        """Counts one chunk span that was allocated."""
        self.lookups += 1
        if is_hit:
            self.hits += 1
            self.moved_chunk_tokens += span.num_tokens if span.distance else 0
            self.reused_chunk_tokens += 0 if span.distance else span.num_tokens


def snapshot(counters: Counters, chunks: ChunkIndex, prefix: PrefixCache, request_pool: BlockPool) -> ChunkCacheStats:
    """The statistics at this moment."""
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
