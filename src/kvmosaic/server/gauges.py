"""Gauges of a running server: fill levels and the engine's counters, as metrics."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvmosaic import __version__
from kvmosaic.metrics import Sample, own_names, vllm_names
from kvmosaic.server.tier_gauges import tier_readings
from kvmosaic.tuned_settings import SETTINGS

if TYPE_CHECKING:
    from kvmosaic.cache import ChunkCacheStats
    from kvmosaic.engine import EngineFigures
    from kvmosaic.server.services import Services

MAX_TENANTS = 32
OTHERS = "(others)"
"""A name that no tenant can have."""
TIER = {"tier": "device"}


class ServerReadings:
    """Collector of all values that are read on a scrape; the engine's figures are as of its last step."""

    def __init__(self, services: Services) -> None:
        self._services = services
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

    def __call__(self) -> Iterator[Sample]:
        """Returns all values at this moment."""
        services, figures = self._services, self._services.engine.figures
        yield Sample(vllm_names.REQUESTS_RUNNING, services.engine.num_running)
        yield Sample(vllm_names.REQUESTS_WAITING, services.engine.num_waiting)
        yield from _engine(figures)
        yield from _chunks(figures.caches)
        yield from _pools(figures)
        yield from tier_readings(services.llm.engine.offloader)
        yield from self._tenant_readings(figures)
        yield from self._documents()
        yield Sample(own_names.REJECTIONS, services.admission.num_refused)
        yield Sample(own_names.ENGINE_UP, float(services.engine.is_healthy))
        yield Sample(own_names.ENGINE_ASLEEP, float(services.engine.is_asleep))
        yield Sample(own_names.DRAINING, float(services.admission.is_draining))
        yield Sample(own_names.SNAPSHOT_AGE, services.engine.figures_age_seconds)
        yield Sample(own_names.COMPOSITION, 1, self._composition)
        yield Sample(own_names.BUILD, 1, self._versions)

    def _tenant_readings(self, figures: EngineFigures) -> Iterator[Sample]:
        num_bytes = dict.fromkeys((owner.name for owner in self._tenants[:MAX_TENANTS]), 0)
        if len(self._tenants) > MAX_TENANTS:
            num_bytes[OTHERS] = 0
        for tenant, usage in figures.usages.items():
            name = tenant if tenant in num_bytes else OTHERS
            num_bytes[name] = num_bytes.get(name, 0) + usage.num_bytes
        for name, number in num_bytes.items():
            yield Sample(own_names.TENANT_BYTES, number, {"tenant": name})
        for owner in self._tenants[:MAX_TENANTS]:
            if owner.quota_bytes is not None:
                yield Sample(own_names.TENANT_QUOTA, owner.quota_bytes, {"tenant": owner.name})

    def _documents(self) -> Iterator[Sample]:
        usage = self._services.documents.usage()
        yield Sample(own_names.DOCUMENTS, usage.num_documents)
        yield Sample(own_names.DOCUMENT_BYTES, usage.num_bytes)


def _engine(figures: EngineFigures) -> Iterator[Sample]:
    caches = figures.caches
    held = caches.request_used_blocks - caches.request_idle_blocks
    yield Sample(vllm_names.KV_CACHE_USAGE, held / max(caches.request_total_blocks, 1))
    yield Sample(vllm_names.PREFIX_QUERIES, caches.prefix_lookup_tokens)
    yield Sample(vllm_names.PREFIX_HITS, caches.prefix_hit_tokens)
    yield Sample(vllm_names.PREEMPTIONS, sum(figures.preemptions.values()))
    for kind, count in figures.preemptions.items():
        yield Sample(own_names.PREEMPTIONS, count, {"kind": kind})
    for direction, num_bytes in figures.swapped_bytes.items():
        yield Sample(own_names.SWAPPED_BYTES, num_bytes, {"direction": direction})
    yield Sample(own_names.SWAP_SPACE_BYTES, figures.swap_space_bytes)
    yield Sample(own_names.PREFIX_EVICTIONS, caches.prefix_evictions)
    yield Sample(own_names.PREFIX_BLOCKS, caches.prefix_blocks)


def _chunks(caches: ChunkCacheStats) -> Iterator[Sample]:
    yield Sample(own_names.CHUNK_LOOKUPS, caches.lookups)
    yield Sample(own_names.CHUNK_HITS, caches.hits)
    yield Sample(own_names.CHUNK_MISSES, caches.misses)
    tokens = (caches.reused_tokens, caches.moved_tokens, caches.computed_tokens)
    for action, count in zip(own_names.ACTIONS, tokens, strict=True):
        yield Sample(own_names.CHUNK_TOKENS, count, {"action": action})
    yield Sample(own_names.CHUNK_LOADS, caches.loaded_chunks)
    yield Sample(own_names.CHUNK_LOADED_TOKENS, caches.loaded_tokens)
    yield Sample(own_names.CHUNK_EVICTIONS, caches.evictions)
    yield Sample(own_names.CHUNKS_CACHED, caches.cached_chunks)
    yield Sample(own_names.CHUNKS_PINNED, caches.pinned_chunks)
    yield Sample(own_names.CHUNK_LOOKUP_SECONDS, caches.lookup_seconds, count=caches.planned_chunks)
    yield Sample(own_names.CHUNK_ATTACH_SECONDS, caches.allocate_seconds, count=caches.allocates)
    yield Sample(own_names.CHUNK_COMPUTE_SECONDS, caches.compute_seconds, count=caches.computes)


def _pools(figures: EngineFigures) -> Iterator[Sample]:
    caches = figures.caches
    fills = {
        "request": (caches.request_total_blocks, caches.request_used_blocks, caches.request_idle_blocks),
        "chunk_cache": (caches.total_blocks, caches.used_blocks, caches.idle_blocks),
    }
    for pool, (total, used, idle) in fills.items():
        for state, count in zip(own_names.STATES, (total - used, idle, used - idle), strict=True):
            labels = {"pool": pool, "state": state, **TIER}
            yield Sample(own_names.POOL_BLOCKS, count, labels)
            yield Sample(own_names.POOL_BYTES, count * figures.block_bytes[pool], labels)
    shared = {"request": caches.request_shared_blocks, "chunk_cache": caches.shared_blocks}
    for pool, count in shared.items():
        yield Sample(own_names.POOL_SHARED_BLOCKS, count, {"pool": pool, **TIER})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
