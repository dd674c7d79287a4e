"""Services of one app: everything a route may use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from kvmosaic.cpu_limit import cpu_limit
from kvmosaic.server.admission import Admission
from kvmosaic.server.errors import ApiError
from kvmosaic.server.fair_threads import FairThreads
from kvmosaic.server.lifetimes import lifetime_clock
from kvmosaic.server.request_log import RequestLog
from kvmosaic.server.settings import ServerSettings
from kvmosaic.server.tenants import Tenants

if TYPE_CHECKING:
    from kvmosaic.documents import DocumentStore
    from kvmosaic.engine import AsyncEngine
    from kvmosaic.llm import LLM
    from kvmosaic.server.prometheus import ServerMetrics

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 2
"""Threads for tokenizing and compiling grammars; more would only take CPU time from the engine."""


@dataclass
class Services:
    """Services shared by the routes of one app."""

    settings: ServerSettings
    llm: LLM
    engine: AsyncEngine
    tenants: Tenants
    documents: DocumentStore
    admission: Admission
    records: RequestLog
    clock: Callable[[], float] = time.time
    metrics: ServerMetrics = field(init=False)
    threads: FairThreads = field(init=False)
    _work: set[Future[Any]] = field(default_factory=set)
    """Queued or running work, including work whose caller was cancelled."""
    _awaited: dict[asyncio.Future[Any], str] = field(default_factory=dict)
    """Awaited work, with its tenant."""
    _is_closed: bool = False

    def __post_init__(self) -> None:
        self.threads = FairThreads(NUM_THREADS, {tenant.name: tenant.weight for tenant in self.tenants})

    @property
    def is_working(self) -> bool:
        """Whether a thread is busy; it cannot be stopped, and would keep the process from exiting."""
        return any(work.running() for work in list(self._work))

    async def in_thread(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs slow work of a tenant's request beside the event loop: tokenizing, compiling a grammar, reading a list.

        Scheduled fairly among tenants.

        Raises:
            ApiError: 429, too much of it is queued; 503, the server closes.
            Whatever `function` raises.
        """
        if self._is_closed:
            raise self._closing()
        if len(self._awaited) >= self.settings.max_queue + NUM_THREADS:
            raise self.admission.full(f"{len(self._awaited)} requests wait to be read", "queue_full")
        num_of_tenant = list(self._awaited.values()).count(tenant)
        if num_of_tenant >= self.settings.max_queue_per_tenant + NUM_THREADS:
            raise self.admission.full(f"{num_of_tenant} requests of {tenant!r} wait to be read", "tenant_queue_full")
        work = self.threads.submit(tenant, self._limited(function), *args, **kwargs)
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        awaited = asyncio.wrap_future(work)
        self._awaited[awaited] = tenant
        try:
            return await awaited
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise self._closing() from None
            raise
        finally:
            self._awaited.pop(awaited, None)

    def _limited(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def limited(*args: P.args, **kwargs: P.kwargs) -> T:
            with cpu_limit(self.settings.request_cpu_seconds):
                return function(*args, **kwargs)

        return limited

    async def close(self) -> None:
        """Aborts all work: streams, requests, threads. Callers that await a thread get an error at once."""
        self.admission.is_draining = self._is_closed = True
        self.records.close()
        for awaited in list(self._awaited):
            awaited.cancel()
        await self.engine.close()
        await asyncio.to_thread(self.llm.close)  # writes pending chunks to the tiers
        self.threads.shutdown()

    def _closing(self) -> ApiError:
        return self.admission.unavailable("the server ended this request before it was read")


def build_services(settings: ServerSettings, llm: LLM, *, clock: Callable[[], float] | None = None) -> Services:
    """Starts the engine of a loaded model, and builds everything the routes need.

    `clock` returns unix seconds; by default the system's time, and for TTLs one that does not change with it.
    """
    from kvmosaic.documents import DocumentStore, StoreLimits
    from kvmosaic.engine import AsyncEngine
    from kvmosaic.server.prometheus import ServerMetrics

    engine = AsyncEngine(llm.engine)
    tenants = Tenants(settings.access_keys())
    for tenant in tenants:
        if tenant.quota_bytes is not None:
            llm.engine.kv_cache.set_quota(tenant.name, tenant.quota_bytes)
        llm.engine.scheduler.shares.set_weight(tenant.name, tenant.weight)
    admission = Admission(
        max_running=settings.max_num_seqs,
        max_queue=settings.max_queue,
        max_queue_per_tenant=settings.max_queue_per_tenant,
    )
    documents = DocumentStore(
        default_ttl_seconds=settings.document_ttl,
        limits=StoreLimits(max_documents=settings.max_documents, max_bytes=settings.max_documents_bytes),
        clock=clock or lifetime_clock(),
    )
    services = Services(settings, llm, engine, tenants, documents, admission, RequestLog(), clock or time.time)
    services.metrics = ServerMetrics(services)
    engine.start()
    return services
