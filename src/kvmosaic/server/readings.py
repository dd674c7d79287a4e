"""Readings of a running server: fill levels and the engine's own counters, as metrics."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvmosaic import __version__
from kvmosaic.errors import KVMosaicError
from kvmosaic.metrics import Reading, own_names, vllm_names
from kvmosaic.profile import SETTINGS
from kvmosaic.server.tier_readings import tier_readings

if TYPE_CHECKING:
    from kvmosaic.cache import ChunkCacheStats
    from kvmosaic.engine import AsyncEngine, Engine
    from kvmosaic.server.services import Services

MAX_AGE_SECONDS = 0.1
MAX_WAIT_SECONDS = 0.05
"""A step may take long, and a scrape must not."""
MAX_TENANTS = 32
OTHERS = "(others)"
"""No tenant can be called so."""
TIER = {"tier": "device"}


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The numbers of an engine between two steps."""

    time: float
    """Seconds on a monotonic clock."""
    caches: ChunkCacheStats
    preemptions: Mapping[str, int]
    """By what became of the blocks."""
    swapped_bytes: Mapping[str, int]
    """Out of the device, and back into it."""
    swap_space_bytes: int
    block_bytes: Mapping[str, int]
    """Per pool: bytes of one block over all layers."""
    tenant_bytes: Mapping[str, int]
    """Bytes of cached chunks, of the first `MAX_TENANTS` tenants each, and of all others under `OTHERS`."""


def take_snapshot(engine: Engine, tenants: Sequence[str]) -> EngineSnapshot:
    """Reads an engine; on the engine's thread, or before it has one."""
    tenant_bytes: dict[str, int] = {}
    for index, tenant in enumerate(tenants):
        name = tenant if index < MAX_TENANTS else OTHERS
        tenant_bytes[name] = tenant_bytes.get(name, 0) + engine.planner.tenant_usage(tenant).num_bytes
    preemption = engine.scheduler.preemption
    swap = preemption.swap
    return EngineSnapshot(
        time=time.monotonic(),
        caches=engine.planner.statistics(),
        preemptions={str(kind): count for kind, count in preemption.counts.items()},
        swapped_bytes=dict.fromkeys(own_names.DIRECTIONS, 0) if swap is None else dict(swap.moved_bytes),
        swap_space_bytes=0 if swap is None else swap.num_bytes,
        block_bytes={pool: storage.bytes_per_block for pool, storage in engine.runner.storages.items()},
        tenant_bytes=tenant_bytes,
    )


class Snapshots:
    """The latest snapshot of an engine, taken anew when it is asked for and 0.1 s old.

    `refresh` waits 50 ms at most. A snapshot that takes longer, because a step does, is there for the next one.
    """

    def __init__(self, engine: AsyncEngine, first: EngineSnapshot, tenants: Sequence[str]) -> None:
        self.latest = first
        self._engine = engine
        self._tenants = tuple(tenants)
        self._task: asyncio.Task[None] | None = None

    @property
    def age_seconds(self) -> float:
        """Since the latest one was taken."""
        return max(time.monotonic() - self.latest.time, 0.0)

    async def refresh(self) -> EngineSnapshot:
        """The latest snapshot, at most 0.1 s old if the engine can be asked in time."""
        if self.age_seconds > MAX_AGE_SECONDS:
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._take())
            await asyncio.wait({self._task}, timeout=MAX_WAIT_SECONDS)
        return self.latest

    async def _take(self) -> None:
        try:
            self.latest = await self._engine.call(lambda engine: take_snapshot(engine, self._tenants))
        except KVMosaicError:
            return  # an engine that has stopped changes no more; `engine_up` says so


class ServerReadings:
    """Everything that is read when somebody looks."""

    def __init__(self, services: Services, snapshots: Snapshots) -> None:
        self._services = services
        self._snapshots = snapshots
        self._tenants = list(services.tenants)
        llm = services.llm
        self._composition = {
            **{name: str(getattr(llm.chunk_cache_config, name)) for name in SETTINGS},
            "profile": "" if llm.profile is None else llm.profile.date,
        }
        self._versions = {
            "version": __version__,
            "python": platform.python_version(),
            "torch": _version("torch"),
            "transformers": _version("transformers"),
        }

    def __call__(self) -> Iterator[Reading]:
        """All values at this moment."""
        services, snapshot = self._services, self._snapshots.latest
        yield Reading(vllm_names.REQUESTS_RUNNING, services.engine.num_running)
        yield Reading(vllm_names.REQUESTS_WAITING, services.engine.num_waiting)
        yield from _engine(snapshot)
        yield from _chunks(snapshot.caches)
        yield from _pools(snapshot)
        yield from tier_readings(services.llm.engine.keeper)
        yield from self._tenant_readings(snapshot)
        yield from self._documents()
        yield Reading(own_names.REJECTIONS, services.admission.num_refused)
        yield Reading(own_names.ENGINE_UP, float(services.engine.is_well))
        yield Reading(own_names.ENGINE_ASLEEP, float(services.engine.is_asleep))
        yield Reading(own_names.DRAINING, float(services.admission.is_draining))
        yield Reading(own_names.SNAPSHOT_AGE, self._snapshots.age_seconds)
        yield Reading(own_names.COMPOSITION, 1, self._composition)
        yield Reading(own_names.BUILD, 1, self._versions)

    def _tenant_readings(self, snapshot: EngineSnapshot) -> Iterator[Reading]:
        for tenant, num_bytes in snapshot.tenant_bytes.items():
            yield Reading(own_names.TENANT_BYTES, num_bytes, {"tenant": tenant})
        for owner in self._tenants[:MAX_TENANTS]:
            if owner.quota_bytes is not None:
                yield Reading(own_names.TENANT_QUOTA, owner.quota_bytes, {"tenant": owner.name})

    def _documents(self) -> Iterator[Reading]:
        usages = [self._services.documents.usage(tenant.name) for tenant in self._tenants]
        yield Reading(own_names.DOCUMENTS, sum(usage.num_documents for usage in usages))
        yield Reading(own_names.DOCUMENT_BYTES, sum(usage.num_bytes for usage in usages))


def _engine(snapshot: EngineSnapshot) -> Iterator[Reading]:
    caches = snapshot.caches
    held = caches.request_used_blocks - caches.request_idle_blocks
    yield Reading(vllm_names.KV_CACHE_USAGE, held / max(caches.request_total_blocks, 1))
    yield Reading(vllm_names.PREFIX_QUERIES, caches.prefix_lookup_tokens)
    yield Reading(vllm_names.PREFIX_HITS, caches.prefix_hit_tokens)
    yield Reading(vllm_names.PREEMPTIONS, sum(snapshot.preemptions.values()))
    for kind, count in snapshot.preemptions.items():
        yield Reading(own_names.PREEMPTIONS, count, {"kind": kind})
    for direction, num_bytes in snapshot.swapped_bytes.items():
        yield Reading(own_names.SWAPPED_BYTES, num_bytes, {"direction": direction})
    yield Reading(own_names.SWAP_SPACE_BYTES, snapshot.swap_space_bytes)
    yield Reading(own_names.PREFIX_EVICTIONS, caches.prefix_evictions)
    yield Reading(own_names.PREFIX_BLOCKS, caches.prefix_blocks)


def _chunks(caches: ChunkCacheStats) -> Iterator[Reading]:
    yield Reading(own_names.CHUNK_LOOKUPS, caches.lookups)
    yield Reading(own_names.CHUNK_HITS, caches.hits)
    yield Reading(own_names.CHUNK_MISSES, caches.misses)
    tokens = (caches.reused_tokens, caches.moved_tokens, caches.computed_tokens)
    for action, count in zip(own_names.ACTIONS, tokens, strict=True):
        yield Reading(own_names.CHUNK_TOKENS, count, {"action": action})
    yield Reading(own_names.CHUNK_LOADS, caches.loaded_chunks)
    yield Reading(own_names.CHUNK_LOADED_TOKENS, caches.loaded_tokens)
    yield Reading(own_names.CHUNK_EVICTIONS, caches.evictions)
    yield Reading(own_names.CHUNKS_CACHED, caches.cached_chunks)
    yield Reading(own_names.CHUNKS_PINNED, caches.pinned_chunks)
    yield Reading(own_names.CHUNK_LOOKUP_SECONDS, caches.lookup_seconds, count=caches.planned_chunks)
    yield Reading(own_names.CHUNK_ATTACH_SECONDS, caches.attach_seconds, count=caches.attaches)
    yield Reading(own_names.CHUNK_COMPUTE_SECONDS, caches.compute_seconds, count=caches.computes)


def _pools(snapshot: EngineSnapshot) -> Iterator[Reading]:
    caches = snapshot.caches
    fills = {
        "request": (caches.request_total_blocks, caches.request_used_blocks, caches.request_idle_blocks),
        "chunk_cache": (caches.total_blocks, caches.used_blocks, caches.idle_blocks),
    }
    for pool, (total, used, idle) in fills.items():
        for state, count in zip(own_names.STATES, (total - used, idle, used - idle), strict=True):
            labels = {"pool": pool, "state": state, **TIER}
            yield Reading(own_names.POOL_BLOCKS, count, labels)
            yield Reading(own_names.POOL_BYTES, count * snapshot.block_bytes[pool], labels)
    shared = {"request": caches.request_shared_blocks, "chunk_cache": caches.shared_blocks}
    for pool, count in shared.items():
        yield Reading(own_names.POOL_SHARED_BLOCKS, count, {"pool": pool, **TIER})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
