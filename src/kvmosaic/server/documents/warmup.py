"""Warming: prefill of documents ahead of requests, a few at a time, with a result for each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import islice

from kvmosaic.api.warming import WarmedDocument
from kvmosaic.engine import Request
from kvmosaic.errors import ChunkCacheOff
from kvmosaic.layout import ChunkContext
from kvmosaic.prompt import Document, Prompt
from kvmosaic.prompt.patterns import FindDocuments
from kvmosaic.server.errors import ApiError, as_api_error
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant

logger = logging.getLogger("kvmosaic.server")
WINDOW = 8
"""Documents in progress at once: enough to fill steps, few enough to leave room for other requests."""


@dataclass(frozen=True, slots=True)
class WarmJob:
    """Documents to compute, and the prompts to compute them for."""

    documents: tuple[Document | str, ...]
    """Texts, or ids of stored documents, which are read just before they are computed."""
    system: str | None = None
    """System text of the later prompts; a document's KV cache depends on it."""
    salt: str = ""
    chat: bool | None = None
    """Whether the later prompts are conversations; None: if the model has a chat template."""
    chunk_context: ChunkContext | None = None
    """`chunk_context` of the later requests; None: not set, and the server's setting applies."""
    preamble: str | int | None = None
    """In the same way, their `preamble`."""
    find_documents: FindDocuments = ()
    """Their `find_documents`, if they have the documents in their texts."""
    companions: Sequence[str] | None = None
    """Their `companions`."""


def check_warmable(services: Services, tenant: Tenant) -> None:
    """Raises what `warm` would raise, before anything is read.

    Raises:
        ChunkCacheOff: this server caches no chunks.
        ApiError: 503 or 429, the server accepts no requests now.
    """
    if not services.llm.has_chunk_cache:
        raise ChunkCacheOff(f"nothing can be warmed, the chunk cache is off: {services.llm.chunk_cache_off_reason}")
    services.runner.check_engine()
    services.admission.check(tenant)


async def warm(
    services: Services, tenant: Tenant, job: WarmJob, request_id: str
) -> AsyncGenerator[WarmedDocument, None]:
    """Computes documents that are not cached; yields the result of each as it ends.

    Closing the generator, or cancelling the task that reads it, aborts the rest. One that fails does not stop the
    others. All of them count as one request in progress.

    Raises:
        ApiError: 503 or 429, see `check_warmable`.
    """
    waiting = iter(enumerate(job.documents))
    tasks: set[asyncio.Task[WarmedDocument]] = set()
    with services.admission.enter(tenant):
        try:
            while True:
                for index, document in islice(waiting, WINDOW - len(tasks)):
                    coroutine = _end_of(services, tenant, job, index, document, request_id)
                    tasks.add(asyncio.create_task(coroutine, name=f"warm-{index}"))
                if not tasks:
                    return
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for warmed in sorted((task.result() for task in done), key=lambda one: one.index):
                    yield warmed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def num_evictions(services: Services, tenant: Tenant) -> int:
    """Returns how many chunks of a tenant have been evicted so far."""
    usage = await services.engine.call(lambda engine: engine.kv_cache.tenant_usage(tenant.name))
    return usage.num_evictions


async def warm_stored(services: Services) -> None:
    """Computes the stored documents of all tenants, the newest first, as far as the cache has room.

    They are computed for requests with the system text `warm_system`, and as other requests leave time for it.
    """
    for tenant in services.tenants:
        stored = await asyncio.to_thread(services.documents.documents, tenant.name)
        job = WarmJob(tuple(document.id for document in reversed(stored)), services.settings.warm_system)
        num_tokens, evictions = 0, await num_evictions(services, tenant)
        try:
            async with aclosing(warm(services, tenant, job, "warm-on-start")) as ends:
                async for warmed in ends:
                    num_tokens += warmed.num_tokens
                    if await num_evictions(services, tenant) > evictions:
                        logger.warning("the cache is full after %d tokens of stored documents", num_tokens)
                        break
        except ApiError as error:
            logger.warning("stored documents are not computed at the start: %s", error.message)
            return
        if stored:
            logger.info("computed %d tokens of %d stored documents at the start", num_tokens, len(stored))


async def _end_of(
    services: Services, tenant: Tenant, job: WarmJob, index: int, document: Document | str, request_id: str
) -> WarmedDocument:
    """Warms one document; returns any failure as part of the result."""
    document_id = document if isinstance(document, str) else document.id
    try:
        if isinstance(document, str):
            stored = await services.in_thread(tenant.name, services.documents.get, tenant.name, document)
            document = stored.content
        prompts = await services.in_thread(tenant.name, _prompts_of, services, document, job, tenant.name)
        ended: list[Request] = []
        async with aclosing(services.engine.warm(prompts, chunk_context=job.chunk_context)) as ends:
            async for _, request in ends:
                if request.error is not None:
                    raise request.error
                if not request.reuse.segments:  # it was aborted
                    raise services.admission.unavailable("the server stopped before this document was computed")
                ended.append(request)
                services.records.learn(request.reuse)
    except Exception as error:
        return WarmedDocument(index, document_id, error=as_api_error(error, request_id))
    chunks = [segment for request in ended for segment in request.reuse.segments if segment.kind == "chunk"]
    return WarmedDocument(
        index=index,
        id=document_id,
        num_tokens=sum(chunk.num_tokens for chunk in chunks),
        num_chunks=len(chunks),
        was_cached=all(chunk.reused_tokens == chunk.num_tokens for chunk in chunks),
        milliseconds=sum(chunk.milliseconds for chunk in chunks),
    )


def _prompts_of(services: Services, document: Document, job: WarmJob, tenant: str) -> Sequence[Prompt]:
    """Returns one prompt for each chunk and place of it, so that they need not fit into memory together."""
    llm = services.llm
    companions = services.documents.companions(tenant, llm.chunk_cache_config.companions, job.companions)
    prompt = llm.encoder.beside(companions).encode_documents(
        [document],
        job.system,
        salt=job.salt,
        chat=job.chat,
        preamble=job.preamble,
        find_documents=job.find_documents,
    )
    context = job.chunk_context or llm.chunk_cache_config.context_in()
    return [replace(single, tenant=tenant) for single in prompt.singles(with_places=context == "companions")]
