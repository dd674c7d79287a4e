"""Engine figures: a snapshot of an engine's numbers as of its last step, readable without waiting for a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvmosaic.cache import ChunkCacheStats, TenantUsage
from kvmosaic.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The numbers of an engine between two steps. Immutable."""

    time: float
    """When they were taken: seconds on a monotonic clock."""
    caches: ChunkCacheStats
    usages: Mapping[str, TenantUsage]
    """By tenant, for tenants that have chunks or a quota."""
    num_running: Mapping[str, int]
    """By tenant: running sequences, for tenants that have any."""
    preemptions: Mapping[str, int]
    """By kind: recomputed or swapped."""
    swapped_bytes: Mapping[str, int]
    """From device to host ("out"), and back ("in")."""
    swap_space_bytes: int
    block_bytes: Mapping[str, int]
    """Per pool: bytes of one block over all layers."""
    lost_reuse: Mapping[str, int]
    """By reason: tokens computed that could have been cache hits."""
    advice: Mapping[str, tuple[str, ...]]
    """By tenant: what to do about it."""


def take_figures(engine: Engine) -> EngineFigures:
    """Reads an engine; on the engine's thread, or before it has one.

    Takes microseconds, however much is cached: it runs after every step.
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
        lost_reuse=engine.advisor.lost,
        advice=engine.advisor.advice,
    )
