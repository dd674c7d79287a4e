"""Dashboard feed: state and events for all viewers; a tenant sees its own figures, an admin those of all tenants."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvmosaic.api.fields import MAX_ANSWER_TOKENS
from kvmosaic.assembly import BUNDLED_READER
from kvmosaic.cache import TenantUsage
from kvmosaic.documents import DocumentStore
from kvmosaic.engine import AsyncEngine
from kvmosaic.errors import KVMosaicError
from kvmosaic.llm import LLM
from kvmosaic.server.admission import AdmissionControl
from kvmosaic.server.dashboard.views import (
    EngineSnapshot,
    blocks_view,
    chunks_view,
    example_questions,
    own_pools_view,
    pools_view,
    record_view,
    take_snapshot,
    tier_view,
    usage_view,
)
from kvmosaic.server.metrics.gauges import DocumentTotals, look_at_tiers
from kvmosaic.server.metrics.request_log import RequestLog, RequestRecord
from kvmosaic.server.settings import ServerSettings
from kvmosaic.server.tenants import Tenant
from kvmosaic.web.errors import ApiError

MAX_RECORDS = 500
"""Records kept, of which a tenant sees its own."""
NUM_RECORDS = 60
"""Maximum number of records drawn, and waiting to be sent."""
PAUSE_SECONDS = 0.2
"""Pause between two deliveries, so that a busy server sends its records in batches."""

News = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NumberedRecord:
    """A request record with the numbers that identify it in the dashboard."""

    record: RequestRecord
    number: int
    """Number among the records of all tenants; for admins only."""
    own_number: int
    """Number among the records of its tenant: the other number would reveal how many requests other tenants send."""

    def view_for(self, tenant: Tenant, *, with_segments: bool = True) -> News:
        """Returns the view that a tenant allowed to see the record receives."""
        number = self.number if tenant.is_admin else self.own_number
        return record_view(number, self.record, with_segments=with_segments)


@dataclass(eq=False, slots=True)
class Viewer:
    """Pending events of one viewer: the latest state of each kind, and ended records.

    A slow viewer misses old states and the oldest records; the queue is bounded.
    """

    tenant: Tenant
    _latest: dict[str, News] = field(default_factory=dict)
    _sent: dict[str, News] = field(default_factory=dict)
    _records: deque[NumberedRecord] = field(default_factory=lambda: deque(maxlen=NUM_RECORDS))
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closed: bool = False

    def may_see(self, record: RequestRecord) -> bool:
        """Whether this viewer may see a record."""
        return self.tenant.is_admin or self.tenant.name == record.tenant

    def offer(self, name: str, news: News) -> None:
        """Queues a state unless it equals the last one with this name."""
        if news != self._sent.get(name):
            self._sent[name] = self._latest[name] = news
            self._has_news.set()

    def add_record(self, numbered: NumberedRecord) -> None:
        """Queues a record if this viewer may see it."""
        if self.may_see(numbered.record):
            self._records.append(numbered)
            self._has_news.set()

    def close(self) -> None:
        """Ends the stream of this viewer."""
        self._is_closed = True
        self._has_news.set()

    async def take(self) -> list[tuple[str, Any]]:
        """Waits for events and returns all of them; an empty list means that the stream has ended."""
        await self._has_news.wait()
        if self._is_closed:
            return []
        await asyncio.sleep(PAUSE_SECONDS)
        self._has_news.clear()
        news: list[tuple[str, Any]] = list(self._latest.items())
        if self._records:
            news.insert(0, ("records", [numbered.view_for(self.tenant) for numbered in self._records]))
        self._latest.clear()
        self._records.clear()
        return news


logger = logging.getLogger("kvmosaic.server")

MAX_VIEWERS = 128
"""Maximum number of streams. A tenant may hold as many as it leaves free: half of them if it is alone, a third each if
there are two. However many streams other tenants hold, a new tenant gets one as long as one is free."""
ADMIN_VIEWERS = 8
"""Of these, slots reserved for admins, so that tenants cannot lock them out."""
NUM_STRIPS = 6
"""Number of records in the first event that include their segments."""
ANSWER_TOKENS = 128
"""Maximum length of an answer to a question asked in the dashboard, unless the viewer sets another."""
RETRY_SECONDS = 5


class Feed:
    """Sends the state of the engine and the ended requests to all viewers.

        engine ──figures, as of the last step────────────────▶ own figures, or all ──▶ event stream
               ──snapshot, at most once per second for all───▶
        documents ──their number and last change─────────────▶
        records ──as they end────────────────────────────────▶

    A tenant gets its own figures, an admin those of all tenants. Only the snapshot waits for a busy engine: until then,
    blocks are shown as of the last snapshot. Without viewers, no snapshot is taken. Used on one event loop only.
    Documents are not sent: a viewer that shows some reads them from /v1/documents when they have changed.
    """

    def __init__(
        self,
        llm: LLM,
        engine: AsyncEngine,
        documents: DocumentStore,
        admission: AdmissionControl,
        records: RequestLog,
        settings: ServerSettings,
        *,
        seconds: float = 1.0,
        max_viewers: int = MAX_VIEWERS,
    ) -> None:
        """Subscribes to the records; sends states every `seconds` to at most `max_viewers` streams."""
        self._llm = llm
        self._engine = engine
        self._totals = DocumentTotals(documents)
        self._admission = admission
        self._settings = settings
        self._seconds = seconds
        self._max_viewers = max_viewers
        self.viewers: list[Viewer] = []
        self._records: deque[NumberedRecord] = deque(maxlen=MAX_RECORDS)
        self._num_records = 0
        self._num_records_of: Counter[str] = Counter()
        """By tenant."""
        self._glance: EngineSnapshot | None = None
        self._last_look = float("-inf")
        self._looking: asyncio.Task[EngineSnapshot] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._started = time.time()
        records.listen(self._note)

    async def watch(self, tenant: Tenant) -> AsyncGenerator[tuple[str, Any], None]:
        """Yields named events for one viewer: `state` first, then `records`, `statistics`, `documents` and `blocks`.

        Raises:
            ApiError: 429, this tenant has too many streams already; 503, all slots are taken, or the server shuts down.
        """
        self._check_room(tenant)
        viewer = Viewer(tenant)
        self.viewers.append(viewer)
        try:
            await self._totals.read({tenant.name})
            if self._telling is None or self._telling.done():
                self._glance = None  # the snapshot taken for earlier viewers may be old
                self._telling = asyncio.create_task(self._tell(), name="dashboard-feed")
            yield "state", self._state(viewer)
            while news := await viewer.take():
                for event in news:
                    yield event
        finally:
            self.viewers.remove(viewer)

    def _check_room(self, tenant: Tenant) -> None:
        admission = self._admission
        if admission.is_draining:
            raise admission.unavailable("the server is shutting down")
        num_places = self._max_viewers - (0 if tenant.is_admin else min(ADMIN_VIEWERS, self._max_viewers // 2))
        num_free = num_places - len(self.viewers) - 1
        if num_free < 0:
            message = f"{num_places} viewers look at this dashboard, which is the limit; close one of them"
            raise _too_many(503, message, "service_unavailable")
        num_own = sum(viewer.tenant.name == tenant.name for viewer in self.viewers)
        if num_own and num_own + 1 > num_free:
            message = (
                f"{num_own} viewers of {tenant.name!r} look at this dashboard, which is its share of {num_places}: no "
                "more than it leaves free; close one of them"
            )
            raise _too_many(429, message, "rate_limit_error")

    async def _tell(self) -> None:
        """Takes a snapshot and sends it once per second, as long as there are viewers."""
        try:
            await self._tell_on()
        except Exception:
            logger.exception("the dashboard's feed failed; viewers may come again")
        finally:
            for viewer in self.viewers:
                viewer.close()

    async def _tell_on(self) -> None:
        while self.viewers:
            await asyncio.sleep(max(0.0, self._last_look + self._seconds - time.monotonic()))
            self._last_look = time.monotonic()
            await self._look()
            if self._admission.is_draining:
                return
            tenants = {viewer.tenant for viewer in self.viewers}
            await self._totals.read({tenant.name for tenant in tenants})
            statistics, documents = {}, {}
            for tenant in tenants:
                statistics[tenant] = self._statistics(tenant)
                documents[tenant] = self._document_totals(tenant.name)
            blocks = await self._blocks()
            for viewer in self.viewers:
                if viewer.tenant in statistics:  # a viewer that has just connected has the state
                    viewer.offer("statistics", statistics[viewer.tenant])
                    viewer.offer("documents", documents[viewer.tenant])
                if viewer.tenant.is_admin and blocks is not None:
                    viewer.offer("blocks", blocks)

    async def _look(self) -> None:
        """Takes a snapshot of the engine; while the engine is busy with a long step, waits for the pending one."""
        if self._looking is None:
            with_blocks = any(viewer.tenant.is_admin for viewer in self.viewers)
            tenants = {viewer.tenant.name for viewer in self.viewers}
            call = partial(take_snapshot, tenants=tenants, with_blocks=with_blocks)
            self._looking = asyncio.create_task(self._engine.call(call), name="dashboard-look")
        done, _ = await asyncio.wait({self._looking}, timeout=self._seconds)
        if not done:
            return
        looking, self._looking = self._looking, None
        try:
            self._glance = looking.result()
        except KVMosaicError:
            self._glance = None  # the engine has stopped; the statistics show it

    async def _blocks(self) -> News | None:
        """Encodes the block map beside the event loop: a large pool takes a while."""
        block_map = self._glance.block_map if self._glance else None
        if block_map is None:
            return None
        return await asyncio.to_thread(blocks_view, block_map, self._engine.figures.block_bytes)

    def _note(self, record: RequestRecord) -> None:
        self._num_records += 1
        self._num_records_of[record.tenant] += 1
        numbered = NumberedRecord(record, self._num_records, self._num_records_of[record.tenant])
        self._records.append(numbered)
        for viewer in self.viewers:
            viewer.add_record(numbered)

    def _state(self, viewer: Viewer) -> News:
        """Returns all state that is known now, without waiting for the engine."""
        seen = [numbered for numbered in self._records if viewer.may_see(numbered.record)][-NUM_RECORDS:]
        records = [
            numbered.view_for(viewer.tenant, with_segments=place >= len(seen) - NUM_STRIPS)
            for place, numbered in enumerate(seen)
        ]
        return {
            "server": self._server(viewer.tenant),
            "records": records,
            "statistics": self._statistics(viewer.tenant),
            "documents": self._document_totals(viewer.tenant.name),
            "blocks": None,
        }

    def _server(self, tenant: Tenant) -> News:
        llm, settings = self._llm, self._settings
        config, max_tokens = llm.chunk_cache_config, llm.engine.max_positions or MAX_ANSWER_TOKENS
        return {
            "model": settings.model_names[0],
            "is_toy": settings.model == BUNDLED_READER,
            "engine": str(llm.engine_facts),
            "chunk_cache": {"on": llm.has_chunk_cache, "reason": llm.chunk_cache_off_reason or None},
            "position_strategy": config.position_strategy,
            "repair": str(llm.engine.placer.first_repair),
            "profile": llm.profile.date if llm.profile is not None else None,
            "tenant": tenant.name,
            "is_admin": tenant.is_admin,
            "answer_tokens": {"default": min(ANSWER_TOKENS, max_tokens), "max": max_tokens},
            "questions": example_questions(),
        }

    def _statistics(self, tenant: Tenant) -> News:
        engine, figures = self._engine, self._engine.figures
        usage = figures.usages.get(tenant.name) or TenantUsage(0, 0, 0, tenant.quota_bytes, 0, 0)
        shared = {
            "uptime_seconds": int(time.time() - self._started),
            "is_alive": engine.is_healthy,
            "is_asleep": engine.is_asleep,
            "tenant": usage_view(usage),
            "advice": list(figures.advice.get(tenant.name, ())),
        }
        if tenant.is_admin:
            return shared | {
                "running": engine.num_running,
                "waiting": engine.num_waiting,
                "chunks": chunks_view(figures.caches),
                "pools": pools_view(figures),
                "tiers": [tier_view(tier) for tier in look_at_tiers(self._llm.engine.offloader)],
            }
        num_running = figures.num_running.get(tenant.name, 0)
        held_blocks = self._glance.held_blocks.get(tenant.name) if self._glance else None
        return shared | {
            "running": num_running,
            "waiting": max(self._admission.num_under_way_of(tenant) - num_running, 0),
            "chunks": None,
            "pools": own_pools_view(usage, held_blocks, figures),
            "tiers": [],
        }

    def _document_totals(self, tenant: str) -> News:
        """Returns how many documents a tenant has, and their last change, after which lists are read again."""
        usage = self._totals.known(tenant)
        return {"total": usage.num_documents, "bytes": usage.num_bytes, "change": usage.last_change}


def _too_many(status: int, message: str, kind: str) -> ApiError:
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return ApiError(status, message, type=kind, code="too_many_viewers", headers=headers)
