"""Figures: the numbers of an engine as of its last step, for threads that must not wait for it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvmosaic.cache import ChunkCacheStats, TenantUsage
from kvmosaic.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The numbers of an engine between two steps. Nothing in them is changed later."""

    time: float
    """When they were taken: seconds on a monotonic clock."""
    caches: ChunkCacheStats
    usages: Mapping[str, TenantUsage]
    """By tenant, of those that have chunks or a quota."""
    num_running: Mapping[str, int]
    """By tenant: sequences that are being computed, of those that have any."""
    preemptions: Mapping[str, int]
    """By what became of the blocks."""
    swapped_bytes: Mapping[str, int]
    """Out of the device ("out"), and back into it ("in")."""
    swap_space_bytes: int
    block_bytes: Mapping[str, int]
    """Per pool: bytes of one block over all layers."""


def take_figures(engine: Engine) -> EngineFigures:
    """Reads an engine; on the engine's thread, or before it has one.

    Costs some microseconds, whatever is cached: it is done after every step.
    """
    preemption = engine.scheduler.preemption
    swap = preemption.swap
    return EngineFigures(
        time=time.monotonic(),
        caches=engine.kv_cache.statistics(),
        usages=engine.kv_cache.usages(),
        num_running=Counter(sequence.request.prompt.tenant for sequence in engine.scheduler.running),
        preemptions={str(kind): count for kind, count in preemption.counts.items()},
        swapped_bytes={"out": 0, "in": 0} if swap is None else dict(swap.moved_bytes),
        swap_space_bytes=0 if swap is None else swap.num_bytes,
        block_bytes={str(pool): storage.bytes_per_block for pool, storage in engine.runner.storages.items()},
    )
