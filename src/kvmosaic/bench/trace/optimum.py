"""Clairvoyant eviction: the bound that policies are compared with, from knowing the rest of the trace."""

from __future__ import annotations

import heapq

from kvmosaic.bench.trace.replay import ReplayRow
from kvmosaic.bench.trace.simulation import SimulatedCache
from kvmosaic.bench.trace.trace import Trace
from kvmosaic.bench.trace.variant import FIRST_BLOCK

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
