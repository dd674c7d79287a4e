"""Gauges of a running server: fill levels of pools, tiers and stores, and the engine's counters."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from kvmosaic import __version__
from kvmosaic.documents import DocumentStore, StoreUsage
from kvmosaic.errors import DocumentStoreUnavailable
from kvmosaic.metrics import Sample, own_names, vllm_names
from kvmosaic.tiers import TierStat
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tuned_settings import SETTINGS

if TYPE_CHECKING:
    from kvmosaic.cache import ChunkCacheStats
    from kvmosaic.engine import AsyncEngine, EngineFigures
    from kvmosaic.engine.chunk_offloader import ChunkOffloader
    from kvmosaic.llm import LLM
    from kvmosaic.server.admission import AdmissionControl
    from kvmosaic.server.tenants.access import Tenants

MAX_TENANTS = 32
OTHERS = "(others)"
"""A name that no tenant can have."""
TIER = {"tier": "device"}


class ServerReadings:
    """Collector of all values that are read on a scrape; the engine's figures are as of its last step."""

    def __init__(
        self, llm: LLM, engine: AsyncEngine, tenants: Tenants, documents: DocumentStore, admission: AdmissionControl
    ) -> None:
        self._llm = llm
        self._engine = engine
        self._tenants = list(tenants)
        self._totals = DocumentTotals(documents)
        self._admission = admission
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

    async def refresh(self) -> None:
        """Reads what is not in this process's memory: the numbers of stored documents."""
        await self._totals.read((None,))

    def __call__(self) -> Iterator[Sample]:
        """Returns all values at this moment; those of stored documents are as of the last `refresh`."""
        engine, figures = self._engine, self._engine.figures
        yield Sample(vllm_names.REQUESTS_RUNNING, engine.num_running)
        yield Sample(vllm_names.REQUESTS_WAITING, engine.num_waiting)
        yield from _engine(figures)
        yield from _chunks(figures.caches)
        yield from _pools(figures)
        yield from tier_readings(self._llm.engine.offloader)
        yield from self._tenant_readings(figures)
        yield from self._documents()
        yield Sample(own_names.REJECTIONS, self._admission.num_refused)
        yield Sample(own_names.ENGINE_UP, float(engine.is_healthy))
        yield Sample(own_names.ENGINE_ASLEEP, float(engine.is_asleep))
        yield Sample(own_names.DRAINING, float(self._admission.is_draining))
        yield Sample(own_names.SNAPSHOT_AGE, engine.figures_age_seconds)
        yield Sample(own_names.COMPOSITION, 1, self._composition)
        yield Sample(own_names.BUILD, 1, self._versions)
        yield Sample(own_names.ENGINE, 1, asdict(self._llm.engine_facts))

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
        usage = self._totals.known(None)
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
    for reason, num_tokens in figures.lost_reuse.items():
        yield Sample(own_names.LOST_REUSE_TOKENS, num_tokens, {"reason": reason})
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
    yield Sample(own_names.CHUNK_ALLOCATE_SECONDS, caches.allocate_seconds, count=caches.allocates)
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


@dataclass(frozen=True, slots=True)
class TierMoment:
    """State of one tier at one moment."""

    label: str
    """Its name, with a number if several tiers have it."""
    stat: TierStat
    breaker: Breaker | None
    is_up: bool
    """Whether it is read: no breaker is open for reads."""
    bytes_per_second: float | None
    """Measured read bandwidth; None before the first hit."""


def look_at_tiers(offloader: ChunkOffloader | None) -> list[TierMoment]:
    """Returns the state of all tiers, fastest first, without waiting for any. On any thread."""
    if offloader is None:
        return []
    tiered_store, moments, num_named = offloader.tiered_store, list[TierMoment](), dict[str, int]()
    for tier in tiered_store.tiers:
        number = num_named[tier.name] = num_named.get(tier.name, 0) + 1
        label = tier.name if number == 1 else f"{tier.name}-{number}"
        breaker = tier if isinstance(tier, Breaker) else None
        is_up = breaker is None or not breaker.reads.is_open
        moments.append(TierMoment(label, tier.stat(), breaker, is_up, tiered_store.bytes_per_second(tier)))
    return moments


def tier_readings(offloader: ChunkOffloader | None) -> Iterator[Sample]:
    """Returns all gauges of the tiers; nothing without tiers."""
    if offloader is None:
        return
    for moment in look_at_tiers(offloader):
        yield from _readings_of(moment)
    stats = offloader.tiered_store.stats
    for family, outcomes in own_names.TIER_OUTCOMES.items():
        for outcome in outcomes:
            yield Sample(family, getattr(stats, outcome), {"outcome": outcome})
    yield Sample(own_names.TIER_PENDING_BYTES, offloader.tiered_store.pending_bytes)


def _readings_of(moment: TierMoment) -> Iterator[Sample]:
    stat, labels = moment.stat, {"tier": moment.label}
    values = {
        own_names.TIER_UP: float(moment.is_up),
        **{family: getattr(stat, field) for family, field in own_names.TIER_COUNTERS.items()},
    }
    for family, value in values.items():
        yield Sample(family, value, labels)
    known = {
        own_names.TIER_ENTRIES: stat.num_entries,
        own_names.TIER_BYTES: stat.num_bytes,
        own_names.TIER_QUOTA: stat.quota_bytes,
    }
    for family, number in known.items():
        if number is not None:
            yield Sample(family, number, labels)
    if moment.bytes_per_second is not None:
        yield Sample(own_names.TIER_LOAD_SPEED, moment.bytes_per_second, labels)
    if moment.breaker is not None:
        reads, writes = moment.breaker.reads, moment.breaker.writes
        yield Sample(own_names.TIER_OPENED, reads.opened + writes.opened, labels)
        yield Sample(own_names.TIER_SKIPPED, reads.skipped + writes.skipped, labels)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


WAIT_SECONDS = 1.0
"""Wait for a database that does not answer; then the numbers are those of its last answer."""


class DocumentTotals:
    """The numbers of stored documents, for the page and the metrics.

    A database that is locked or does not answer delays neither the event loop nor a scrape by more than `WAIT_SECONDS`.
    One read is in progress at a time. Used on the event loop.
    """

    def __init__(self, store: DocumentStore) -> None:
        self._store = store
        self._known: dict[str | None, StoreUsage] = {}
        self._reading: asyncio.Task[None] | None = None

    def known(self, tenant: str | None) -> StoreUsage:
        """The numbers of a tenant, or (None) of all, when they were last read; zeros: never."""
        return self._known.get(tenant, StoreUsage(0, 0, 0))

    async def read(self, tenants: Collection[str | None]) -> None:
        """Reads the numbers of these tenants, if the database answers in time."""
        end, covers_all = time.monotonic() + WAIT_SECONDS, False
        while not covers_all:
            if covers_all := self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(asyncio.to_thread(self._read, tuple(tenants)), name="totals")
            assert self._reading is not None
            done, _ = await asyncio.wait({self._reading}, timeout=max(end - time.monotonic(), 0.0))
            if not done:
                return

    def _read(self, tenants: Collection[str | None]) -> None:
        try:
            self._known.update({tenant: self._store.usage(tenant) for tenant in tenants})
        except DocumentStoreUnavailable:
            return
