"""Routes of /v1/documents:warm: compute documents ahead, with an event for each one that ends."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from kvmosaic.api.warming import WarmedObject, WarmOneRequest, WarmOptions, WarmRequest, WarmSummary
from kvmosaic.layout import context_with
from kvmosaic.prompt import Document
from kvmosaic.prompt.patterns import read_find_documents
from kvmosaic.server.documents.routes import ROUTE, IdInPath
from kvmosaic.server.documents.warmup import WarmJob, check_warmable, num_evictions, warm
from kvmosaic.server.errors import request_id_of
from kvmosaic.server.generation.sse import EventStream, event, open_stream
from kvmosaic.server.json_body import ParsedRoute
from kvmosaic.server.openai.replies import error_replies, streamed
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant, current_tenant

Asker = Annotated[Tenant, Depends(current_tenant)]


def router(services: Services) -> APIRouter:
    """Returns the routes that warm one document, or many."""
    routes = APIRouter(route_class=ParsedRoute, tags=["documents"], responses=error_replies())
    responses: dict[int | str, dict[str, Any]] = {
        200: streamed("What became of the documents, or an event for each.", _EXAMPLE)
    }

    @routes.post(ROUTE + ":warm", response_model=WarmSummary, response_model_exclude_unset=True, responses=responses)
    async def warm_documents(request: Request, body: WarmRequest, tenant: Asker) -> WarmSummary | EventStream:
        """Computes documents now, so that later requests find them: some by id, others as they are, or all."""
        check_warmable(services, tenant)
        documents = await services.in_thread(tenant.name, _documents_of, services, tenant, body)
        return await reply(request, tenant, body, documents, body.cache_salt)

    @routes.post(
        ROUTE + "/{document_id:path}:warm",
        response_model=WarmSummary,
        response_model_exclude_unset=True,
        responses=responses,
    )
    async def warm_document(
        request: Request, document_id: IdInPath, tenant: Asker, body: WarmOneRequest | None = None
    ) -> WarmSummary | EventStream:
        """Computes one stored document now."""
        check_warmable(services, tenant)
        await services.in_thread(tenant.name, services.documents.get, tenant.name, document_id)
        body = body or WarmOneRequest()
        return await reply(request, tenant, body, (document_id,), body.cache_salt)

    async def reply(
        request: Request, tenant: Tenant, body: WarmOptions, documents: tuple[Document | str, ...], salt: str | None
    ) -> WarmSummary | EventStream:
        found = read_find_documents(body.find_documents or ())
        context = context_with(body.companions, body.chunk_context)
        job = WarmJob(documents, body.system, salt or "", body.chat, context, body.preamble, found, body.companions)
        if body.stream:
            return await open_stream(request, _events(services, tenant, job, request_id_of(request)))
        return await _whole(services, tenant, job, request_id_of(request))

    return routes


async def _events(services: Services, tenant: Tenant, job: WarmJob, request_id: str) -> AsyncGenerator[str, None]:
    started, summary = time.monotonic(), WarmSummary.empty()
    evictions = await num_evictions(services, tenant)
    async with aclosing(warm(services, tenant, job, request_id)) as ends:
        async for warmed in ends:
            summary.add(warmed)
            yield event(WarmedObject.of(warmed), "document.failed" if warmed.error else "document.warmed")
    summary.ms = round((time.monotonic() - started) * 1e3, 3)
    summary.num_evicted = max(await num_evictions(services, tenant) - evictions, 0)
    yield event(summary, "documents.warmed")


async def _whole(services: Services, tenant: Tenant, job: WarmJob, request_id: str) -> WarmSummary:
    """Returns one reply for all; raises the first error if none could be warmed."""
    started, evictions = time.monotonic(), await num_evictions(services, tenant)
    async with aclosing(warm(services, tenant, job, request_id)) as ends:
        ended = [warmed async for warmed in ends]
    summary = WarmSummary.of(ended, time.monotonic() - started)
    summary.num_evicted = max(await num_evictions(services, tenant) - evictions, 0)
    return summary


def _documents_of(services: Services, tenant: Tenant, body: WarmRequest) -> tuple[Document | str, ...]:
    """Returns ids of stored documents and texts, in the order of the body.

    Raises:
        UnknownDocument: an id that this tenant has not stored.
        InvalidDocument: an entry without text and id.
    """
    store = services.documents
    chosen = body.chosen(lambda: [document.id for document in store.documents(tenant.name)])
    store.check_stored(tenant.name, [name for name in chosen if isinstance(name, str)])
    return chosen


_EXAMPLE = (
    'event: document.warmed\ndata: {"object":"document.warmed","index":0,"id":"ferry","tokens":120,"chunks":1,'
    '"was_cached":false,"ms":8.4}\n\nevent: documents.warmed\ndata: {"object":"documents.warmed","num_documents":1,'
    '"num_computed":1,"num_cached":0,"num_failed":0,"tokens":120,"num_evicted":0,"ms":9.1}\n\n'
)
