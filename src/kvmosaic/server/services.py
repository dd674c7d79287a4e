"""Services: everything a route may use, one set per app."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from kvmosaic.server.admission import Admission
from kvmosaic.server.record import Records
from kvmosaic.server.settings import ServerSettings
from kvmosaic.server.tenants import Tenants

if TYPE_CHECKING:
    from kvmosaic.engine import AsyncEngine
    from kvmosaic.llm import LLM
    from kvmosaic.server.documents import DocumentStore
    from kvmosaic.server.exposition import ServerMetrics

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 2
"""Tokenizing and compiling grammars; more threads would only take time from the engine."""


@dataclass
class Services:
    """What the routes of one app share."""

    settings: ServerSettings
    llm: LLM
    engine: AsyncEngine
    tenants: Tenants
    documents: DocumentStore
    admission: Admission
    records: Records
    clock: Callable[[], float] = time.time
    metrics: ServerMetrics = field(init=False)
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kvmosaic-request")
    )
    _num_in_threads: int = 0

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs slow work of a request beside the event loop: tokenizing, compiling a grammar, reading a large list.

        Raises:
            ApiError: 429, too much of it waits already.
            Whatever `function` raises.
        """
        if self._num_in_threads >= self.settings.max_queue + NUM_THREADS:
            raise self.admission.full(f"{self._num_in_threads} requests wait to be read", "queue_full")
        self._num_in_threads += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.threads, lambda: function(*args, **kwargs))
        finally:
            self._num_in_threads -= 1

    async def close(self) -> None:
        """Ends what is under way: streams, requests, threads."""
        self.admission.is_draining = True
        self.records.close()
        await self.engine.close()
        self.threads.shutdown(wait=False, cancel_futures=True)


def build_services(settings: ServerSettings, llm: LLM, *, clock: Callable[[], float] = time.time) -> Services:
    """Puts a loaded model behind a running engine, with everything the routes need."""
    from kvmosaic.engine import AsyncEngine
    from kvmosaic.server.documents import DocumentStore, StoreLimits
    from kvmosaic.server.exposition import ServerMetrics

    engine = AsyncEngine(llm.engine)
    tenants = Tenants(settings.access_keys())
    for tenant in tenants:
        if tenant.quota_bytes is not None:
            llm.engine.planner.set_quota(tenant.name, tenant.quota_bytes)
    admission = Admission(
        max_running=settings.max_num_seqs,
        max_queue=settings.max_queue,
        max_queue_per_tenant=settings.max_queue_per_tenant,
    )
    documents = DocumentStore(
        default_ttl_seconds=settings.document_ttl,
        limits=StoreLimits(max_documents=settings.max_documents, max_bytes=settings.max_documents_bytes),
        clock=clock,
    )
    services = Services(settings, llm, engine, tenants, documents, admission, Records(), clock)
    services.metrics = ServerMetrics(services)  # reads the engine, whose thread does not run yet
    engine.start()
    return services
