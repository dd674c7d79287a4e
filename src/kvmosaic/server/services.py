"""Services of one app, built once; each route receives the few it uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvmosaic.server.admission import AdmissionControl, FairThreads, RequestThreads
from kvmosaic.server.execution import PromptRunner
from kvmosaic.server.metrics.request_log import RequestLog
from kvmosaic.server.settings import ServerSettings
from kvmosaic.server.tenants.access import Tenant, Tenants

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from kvmosaic.documents import DocumentStore, StoreLimits
    from kvmosaic.engine import AsyncEngine, Engine
    from kvmosaic.llm import LLM
    from kvmosaic.server.metrics.prometheus import ServerMetrics
    from kvmosaic.server.tracing import Tracing

NUM_FILE_THREADS = 2
"""Maximum number of uploaded files read at once, one of them of a single tenant."""


@dataclass
class Services:
    """Everything of one app that outlives a request."""

    settings: ServerSettings
    llm: LLM
    engine: AsyncEngine
    tenants: Tenants
    documents: DocumentStore
    admission: AdmissionControl
    threads: RequestThreads
    file_threads: FairThreads
    """They wait for the processes that read uploaded files."""
    records: RequestLog
    metrics: ServerMetrics
    runner: PromptRunner
    tracing: Tracing | None = None
    """Spans of requests, if they are sent anywhere."""

    async def reload(self, new: ServerSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Applies keys, with their quotas and weights, and the settings that can change; requests go on meanwhile.

        Returns:
            Names of settings that have changed, and of settings whose change needs a restart.

        Raises:
            InvalidConfig: the keys file cannot be used, or all keys were added or removed; nothing has changed.
        """
        settings, changed, unchanged = self.settings.reloaded(new)
        gone = {tenant.name for tenant in self.tenants}
        self.tenants.replace(await asyncio.to_thread(settings.access_keys))
        gone -= {tenant.name for tenant in self.tenants}
        self.settings = settings
        self.admission.max_queue = settings.max_queue
        self.admission.max_queue_per_tenant = settings.max_queue_per_tenant
        self.threads.configure(self.tenants, settings.request_cpu_seconds)
        self.documents.default_ttl_seconds = settings.document_ttl or None
        self.documents.limits = _store_limits(settings)
        await self.engine.call(partial(_apply_tenants, tenants=tuple(self.tenants), gone=gone))
        return changed, unchanged

    async def close(self) -> None:
        """Aborts all work: streams, requests, threads. Callers that await a thread get an error at once."""
        self.admission.is_draining = True
        self.threads.cancel_all()
        await self.engine.close()
        await asyncio.to_thread(self.llm.close)  # writes pending chunks to the tiers
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)
        self.threads.shutdown()
        self.file_threads.shutdown()
        await asyncio.to_thread(self.documents.close)


def build_services(
    settings: ServerSettings,
    llm: LLM,
    *,
    span_exporter: SpanExporter | None = None,
) -> Services:
    """Starts the engine of a loaded model, and builds everything the routes need.

    Args:
        settings: settings of the server.
        llm: the loaded model; its engine must not be used by others.
        span_exporter: receives the spans that `settings.otlp_traces_endpoint` asks for, in place of that address.

    Raises:
        InvalidConfig: tracing is on, and a variable of OpenTelemetry has a value that cannot be used.
    """
    from kvmosaic.documents import DocumentStore
    from kvmosaic.engine import AsyncEngine
    from kvmosaic.server.metrics.gauges import ServerReadings
    from kvmosaic.server.metrics.prometheus import ServerMetrics

    engine = AsyncEngine(llm.engine)
    tenants = Tenants(settings.access_keys())
    _apply_tenants(llm.engine, tuple(tenants))
    admission = AdmissionControl(
        max_running=settings.max_num_seqs,
        max_queue=settings.max_queue,
        max_queue_per_tenant=settings.max_queue_per_tenant,
    )
    documents = DocumentStore(
        settings.document_place(),
        default_ttl_seconds=settings.document_ttl,
        version_seconds=settings.document_version_seconds,
        limits=_store_limits(settings),
    )
    threads = RequestThreads(admission, tenants, settings.request_cpu_seconds)
    weights = {tenant.name: tenant.weight for tenant in tenants}
    file_threads = FairThreads(NUM_FILE_THREADS, weights, name="kvmosaic-file", clock=time.monotonic)
    records = RequestLog()
    readings = ServerReadings(llm, engine, tenants, documents, admission)
    metrics = ServerMetrics(readings, settings.model_names[0], records)
    runner = PromptRunner(engine, admission, records, metrics)
    services = Services(
        settings,
        llm,
        engine,
        tenants,
        documents,
        admission,
        threads,
        file_threads,
        records,
        metrics,
        runner,
    )
    services.tracing = _open_tracing(settings, llm, span_exporter)
    engine.start()
    return services


def _store_limits(settings: ServerSettings) -> StoreLimits:
    from kvmosaic.documents import StoreLimits

    return StoreLimits(max_documents=settings.max_documents, max_bytes=settings.max_documents_bytes)


def _apply_tenants(engine: Engine, tenants: Sequence[Tenant], gone: Iterable[str] = ()) -> None:
    """Sets quotas and weights of tenants, and removes the quotas of tenants without a key."""
    for name in gone:
        engine.kv_cache.set_quota(name, None)
    for tenant in tenants:
        engine.kv_cache.set_quota(tenant.name, tenant.quota_bytes)
        engine.scheduler.shares.set_weight(tenant.name, tenant.weight)


def _open_tracing(settings: ServerSettings, llm: LLM, exporter: SpanExporter | None) -> Tracing | None:
    if settings.otlp_traces_endpoint is None:
        return None
    from kvmosaic.server.tracing import Tracing  # imports OpenTelemetry

    clock = llm.engine.clock
    return Tracing(settings.otlp_traces_endpoint, settings.model_names[0], clock, exporter=exporter)
