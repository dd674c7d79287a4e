"""Simulation of a replay: the library's own layouts, keys, pools and eviction, without a model.

A prompt is planned and allocated in the KV cache, counts as computed at once, and is released. So the figures are those
of an engine that answers one request after the other.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from kvmosaic.bench.progress import Watcher
from kvmosaic.bench.trace.prompts import PromptWriter
from kvmosaic.bench.trace.replay import FIRST_BLOCK, ReplayRow, Variant, replay, reused_documents
from kvmosaic.bench.trace.trace import BLOCK_TOKENS, Trace, TraceRequest
from kvmosaic.cache import KVCache, Plan
from kvmosaic.cache.document_order import in_best_order
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import ChunkCacheFull, InvalidTrace, RequestTooLarge
from kvmosaic.layout import arrange
from kvmosaic.prompt import SegmentKind

MAX_BLOCKS = 2**21
MAX_CACHED_TOKENS = 2**27
"""Limits of a simulated pool, so that any trace fits into memory; older blocks are evicted then."""
MAX_CHUNKS = 10**6
UNLIMITED = "unlimited"
"""Name of a cache without a limit."""
_STRATEGY = "sequential"
_TICK = 1e-6


@dataclass(frozen=True, slots=True)
class SimulatedCache:
    """Size of the caches of a simulation."""

    share: float | None = None
    """Capacity for documents, as a share of all different documents of the trace; None: unlimited. In a trace without
    documents: capacity for all tokens."""
    eviction: str = "lru"
    block_size: int = 16

    def __str__(self) -> str:
        return UNLIMITED if self.share is None else f"{100 * self.share:.4g}%, {self.eviction}"

    @staticmethod
    def block_size_for(trace: Trace) -> int:
        """Block size of the simulation: that of the engine, or whole blocks of a trace that has only those."""
        return 16 if trace.has_documents else BLOCK_TOKENS

    def blocks(self, num_tokens: int) -> int:
        """Capacity in blocks, where all texts have so many tokens."""
        return max(math.ceil((1.0 if self.share is None else self.share) * num_tokens / self.block_size), 1)


def simulate(
    trace: Trace, writer: PromptWriter, variant: Variant, cache: SimulatedCache, watcher: Watcher
) -> ReplayRow:
    """Replays a trace; after an interrupt, the figures so far, with `is_complete` off.

    Args:
        trace: the requests.
        writer: makes their prompts.
        variant: what a document's cache key depends on.
        cache: its size and eviction policy.
        watcher: called after every request.

    Raises:
        InvalidTrace: a prompt that the cache has no room for.
    """
    row = ReplayRow(variant.name, variant.about, str(cache))
    simulation = _Simulation(trace, cache)

    def answer(request: TraceRequest) -> None:
        row.add(*_reused(simulation.answer(request, writer, variant), request, writer))

    replay(row, trace, answer, watcher)
    simulation.count_evictions(row)
    return row


class _Simulation:
    """An empty KV cache that answers requests in the time of the trace."""

    def __init__(self, trace: Trace, cache: SimulatedCache) -> None:
        self._cache = cache
        self._now = 0.0
        self._has_documents = trace.has_documents
        # each part of a prompt begins on a block of its own
        wanted = sum(each.num_tokens // cache.block_size + 3 + len(each.documents) for each in trace.requests)
        limit = min(MAX_BLOCKS, MAX_CACHED_TOKENS // cache.block_size)
        request_blocks = chunk_blocks = max(min(wanted, limit), 1)
        if cache.share is not None and trace.has_documents:
            chunk_blocks = cache.blocks(trace.distinct_document_tokens)
        elif cache.share is not None:
            request_blocks = cache.blocks(trace.distinct_tokens)
        self._kv_cache = KVCache(
            "simulation",
            ChunkCacheConfig(block_size=cache.block_size, max_chunks=MAX_CHUNKS, eviction=cache.eviction),
            request_blocks=request_blocks,
            chunk_blocks=chunk_blocks,
            clock=self._tick,
        )

    def count_evictions(self, row: ReplayRow) -> None:
        """Writes into a row what was evicted."""
        statistics = self._kv_cache.statistics()
        chunks, blocks = statistics.evictions, statistics.prefix_evictions
        row.evictions = chunks if self._has_documents else blocks
        is_unlimited = self._cache.share is None
        row.was_bounded = (is_unlimited and chunks + blocks > 0) or (self._has_documents and blocks > 0)

    def answer(self, request: TraceRequest, writer: PromptWriter, variant: Variant) -> Plan:
        """Plans a prompt, and counts it as computed.

        Raises:
            InvalidTrace: it has no room.
        """
        self._now = max(self._now, request.seconds)
        kv_cache = self._kv_cache
        prompt = writer.prompt(request, variant)
        layout = arrange(prompt, _STRATEGY, variant.chunk_context)
        if variant.documents_order == "any":
            layout = arrange(in_best_order(prompt, layout, kv_cache), _STRATEGY, variant.chunk_context)
        plan = kv_cache.plan(layout)
        try:
            allocation = kv_cache.allocate(plan)
        except (ChunkCacheFull, RequestTooLarge) as error:
            raise InvalidTrace(
                f"a prompt of the trace has no room in a cache of {self._cache} ({error}); raise --cache-share"
            ) from None
        kv_cache.begin_step()
        for index, span in enumerate(allocation.spans):
            if span.can_advance:
                kv_cache.advance(allocation, index, span.num_tokens - span.num_computed)
        kv_cache.end_step()
        kv_cache.release(allocation)
        return plan

    def _tick(self) -> float:
        """Each reading is later than the last one, so that the least recently used chunk is always one."""
        self._now += _TICK
        return self._now


def _reused(plan: Plan, request: TraceRequest, writer: PromptWriter) -> tuple[tuple[int, int], tuple[int, int]]:
    """Tokens of documents, and of the whole prompt: how many there are, and how many are reused."""
    chunks = [span for span in plan.spans if span.is_chunk]
    num_documents = sum(span.num_tokens for span in chunks)
    num_reused = sum(span.num_reused for span in chunks)
    if request.documents and not chunks:
        num_system, num_documents = writer.lengths(request)
        num_reused = reused_documents(plan.reused_tokens, num_system, num_documents)
    spans = [span for span in plan.spans if span.kind is not SegmentKind.COMPANION]
    return (num_documents, num_reused), (sum(s.num_tokens for s in spans), sum(s.num_reused for s in spans))


NAME = "clairvoyant"
_NEVER = 2**62


def clairvoyant(trace: Trace, cache: SimulatedCache) -> ReplayRow:
    """Evicts the document whose next use is farthest away (Belady), for keys of the first block and the document.

    The optimum for documents of one size; for different sizes a close one. Only documents are counted.
    """
    uses = [
        ((request.system[0].id if request.system else -1, block.id), block.num_tokens, number)
        for number, request in enumerate(trace.requests)
        for block in request.documents
    ]
    next_uses, later = [_NEVER] * len(uses), dict[tuple[int, int], int]()
    for index in range(len(uses) - 1, -1, -1):
        next_uses[index] = later.get(uses[index][0], _NEVER)
        later[uses[index][0]] = index
    row = ReplayRow(NAME, FIRST_BLOCK.about, str(cache))
    row.num_requests = len(trace.requests)
    capacity, held, used = cache.blocks(trace.distinct_document_tokens), dict[tuple[int, int], int](), 0
    order: list[tuple[int, tuple[int, int], int]] = []
    for (key, num_tokens, _), next_use in zip(uses, next_uses, strict=True):
        num_blocks = -(-num_tokens // cache.block_size)
        row.document_tokens += num_tokens
        row.document_reused += num_tokens if key in held else 0
        used += 0 if key in held else num_blocks
        held[key] = next_use
        heapq.heappush(order, (-next_use, key, num_blocks))
        while used > capacity:
            farthest, victim, size = heapq.heappop(order)
            if held.get(victim) == -farthest:  # an older entry of a chunk that was used since is skipped
                del held[victim]
                used -= size
                row.evictions += 1
    return row
