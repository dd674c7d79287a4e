"""Documents of this server as routes see them: its threads, its length check, its cached chunks, and its warming."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from fastapi import Request as HTTPRequest

from kvmosaic.api.documents import ChunkObject
from kvmosaic.api.served_documents import ServedDocuments, check_length, most_chunk_tokens
from kvmosaic.api.warming import WarmedDocument, WarmJob, WarmOptions
from kvmosaic.documents import DocumentDraft, StoredDocument
from kvmosaic.engine import Request
from kvmosaic.engine.priorities import START_PRIORITY, WARM_PRIORITY
from kvmosaic.errors import ChunkCacheFull, ChunkCacheOff
from kvmosaic.extraction import FileText, extract_text
from kvmosaic.layout.strategies import AUTO, choose_strategy
from kvmosaic.prompt import Document, Prompt
from kvmosaic.server.documents.cached import (
    count_kept,
    drop_superseded,
    find_cached,
    pin_cached,
    set_cached_priority,
)
from kvmosaic.server.generation.prompts import PromptSources, served_model
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant
from kvmosaic.web.errors import ApiError, as_api_error, request_id_of

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger("kvmosaic.server")


class ServerDocuments(ServedDocuments):
    """The documents of one tenant of this server."""

    def __init__(
        self, services: Services, tenant: Tenant, request_id: str = "", *, warm_priority: int = WARM_PRIORITY
    ) -> None:
        super().__init__(services.documents, tenant.name, services.settings.max_body_bytes, "--max-body-bytes")
        self._services = services
        self._tenant = tenant
        self._request_id = request_id
        self._warm_priority = warm_priority

    @classmethod
    def of(cls, services: Services, request: HTTPRequest) -> ServerDocuments:
        """The documents that a request may use."""
        return cls(services, request.state.tenant, request_id_of(request))

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs slow work in the tenant's turn."""
        return await self._services.threads.run(self.tenant, function, *args, **kwargs)

    async def extract(self, content: bytes, filename: str) -> FileText:
        """Returns the text of a file."""
        return await asyncio.wrap_future(
            self._services.file_threads.submit(self.tenant, extract_text, content, filename)
        )

    def check_length(self, draft: DocumentDraft, document_id: str | None) -> None:
        """Checks that a document alone fits into a prompt of this server.

        Raises:
            InvalidPrompt: see `kvmosaic.api.length_check`.
            ChunkCacheFull: it has more tokens than the chunk cache.
        """
        llm = self._services.llm
        pool, limit = llm.engine.kv_cache.chunk_pool, most_chunk_tokens(llm.encoder)
        cache_tokens = pool.num_blocks * pool.block_size if llm.has_chunk_cache else limit
        prompt = check_length(llm.encoder, draft, document_id, min(limit, cache_tokens))
        if prompt is None or not llm.has_chunk_cache:
            return
        num_tokens = sum(chunk.num_tokens for chunk in prompt.chunks)
        if sum(pool.blocks_for(chunk.num_tokens) for chunk in prompt.chunks) > pool.num_blocks:
            raise ChunkCacheFull(
                f"the document has {num_tokens} tokens, and the chunk cache of this server {cache_tokens} "
                "(--chunk-cache-size); store it in parts, or ask the operator of the server for a larger cache"
            )

    def error_of(self, error: BaseException) -> ApiError:
        """Returns the error that a client sees; the traceback of an unknown one goes to the log."""
        return as_api_error(error, self._request_id)

    async def update_cache(
        self, changed: Sequence[tuple[StoredDocument, DocumentDraft]]
    ) -> Mapping[str, Mapping[str, int]]:
        """Pins and ranks chunks as the drafts say, drops chunks of replaced texts, and counts what is kept of them."""
        for document, draft in changed:
            if document.pinned or draft.pinned is False:
                await self.update_pin(document)
            if draft.priority is not None:
                await self.update_priority(document)
        await drop_superseded(self._services)
        replaced = {document.id: (document, draft) for document, draft in changed if document.version > 1}
        return await count_kept(self._services, self.tenant, [*replaced.values()])

    async def update_pin(self, document: StoredDocument) -> None:
        """Pins or unpins the chunks of a document."""
        await pin_cached(self._services, self.tenant, document)

    async def update_priority(self, document: StoredDocument) -> None:
        """Sets the priority of the chunks of a document."""
        await set_cached_priority(self._services, self.tenant, document)

    async def drop_deleted(self, document: StoredDocument) -> None:
        """Drops the chunks of all texts that were deleted or replaced."""
        await drop_superseded(self._services)

    async def find_chunks(self, documents: Sequence[StoredDocument]) -> Mapping[str, list[ChunkObject]]:
        """Returns the chunks of the current texts of documents, by id."""
        return await find_cached(self._services, self.tenant, documents)

    def check_warmable(self, model: str | None) -> None:
        """Raises what warming would raise, before anything is read.

        Raises:
            ChunkCacheOff: this server caches no chunks.
            ApiError: 404, another model; 503 or 429, the server accepts no requests now.
        """
        services = self._services
        served_model(PromptSources(services.llm, services.documents, services.settings), model)
        if not services.llm.has_chunk_cache:
            raise ChunkCacheOff(f"nothing can be warmed, the chunk cache is off: {services.llm.chunk_cache_off_reason}")
        services.runner.check_engine()
        services.admission.check(self._tenant)

    async def num_evictions(self) -> int:
        """Returns how many chunks of the tenant have been evicted so far."""
        usage = await self._services.engine.call(lambda engine: engine.kv_cache.tenant_usage(self.tenant))
        return usage.num_evictions

    async def warm(self, job: WarmJob) -> AsyncGenerator[WarmedDocument, None]:
        """Computes documents; all of them count as one request in progress."""
        with self._services.admission.enter(self._tenant):
            async with aclosing(super().warm(job)) as ends:
                async for warmed in ends:
                    yield warmed

    async def warm_one(self, job: WarmJob, index: int, document: Document | str) -> WarmedDocument:
        """Computes one document."""
        services = self._services
        document_id = document if isinstance(document, str) else document.id
        try:
            if isinstance(document, str):
                document = (await self.in_thread(self.store.get, self.tenant, document)).content
            prompts, how = await self.in_thread(self._prompts_of, document, job)
            ended: list[Request] = []
            async with aclosing(services.engine.warm(prompts, priority=self._warm_priority, **how)) as ends:
                async for _, request in ends:
                    if request.error is not None:
                        raise request.error
                    if not request.reuse.segments:  # it was aborted
                        raise services.admission.unavailable("the server stopped before this document was computed")
                    ended.append(request)
                    services.records.learn(request.reuse)
        except Exception as error:
            return WarmedDocument(index, document_id, error=self.error_of(error))
        chunks = [segment for request in ended for segment in request.reuse.segments if segment.kind == "chunk"]
        return WarmedDocument(
            index=index,
            id=document_id,
            num_tokens=sum(chunk.num_tokens for chunk in chunks),
            num_chunks=len(chunks),
            was_cached=all(chunk.reused_tokens == chunk.num_tokens for chunk in chunks),
            milliseconds=sum(chunk.milliseconds for chunk in chunks),
        )

    def _prompts_of(self, document: Document, job: WarmJob) -> tuple[Sequence[Prompt], dict[str, Any]]:
        """Returns one prompt for each chunk and place of it, so that they need not fit into memory together.

        And the strategy and context of prompts with the document: with a long one, positions may overlap.
        """
        llm, options = self._services.llm, job.options
        companions = self.store.companions(self.tenant, llm.chunk_cache_config.companions, options.companions)
        prompt = llm.encoder.beside(companions).encode_documents(
            [document],
            options.system,
            salt=job.salt,
            chat=options.chat,
            preamble=options.preamble,
            find_documents=job.find_documents,
        )
        config, strategy = llm.chunk_cache_config, str(llm.chunk_cache_config.position_strategy)
        if strategy == AUTO:
            limit, is_movable = llm.engine.max_positions, llm.model.is_movable
            strategy = choose_strategy(prompt.num_tokens, limit, is_movable=is_movable)
        context = job.chunk_context or config.context_in(strategy)
        singles = prompt.singles(with_places=context == "companions")
        how = {"position_strategy": strategy, "chunk_context": context}
        return [replace(single, tenant=self.tenant) for single in singles], how


async def warm_stored(services: Services, progress: Callable[[int, int], None]) -> str:
    """Computes the stored documents of all tenants, the newest first, as far as the cache has room; says how many.

    They are computed for requests with the system text `warm_system`, and as other requests leave time for it.
    `progress` gets how many of a tenant's documents are done, and of how many.
    """
    options = WarmOptions(system=services.settings.warm_system or None)
    num_documents = num_computed = num_tokens = 0
    for tenant in services.tenants:
        served = ServerDocuments(services, tenant, "warm-on-start", warm_priority=START_PRIORITY)
        stored = await asyncio.to_thread(services.documents.documents, tenant.name)
        job = WarmJob(dict(enumerate(document.id for document in reversed(stored))), options)
        num_documents += len(stored)
        num_done, evictions = 0, await served.num_evictions()
        try:
            async with aclosing(served.warm(job)) as ends:
                async for warmed in ends:
                    num_done, num_tokens = num_done + 1, num_tokens + warmed.num_tokens
                    num_computed += warmed.error is None
                    if warmed.error is not None:
                        logger.warning("%s is not computed: %s", warmed.id, warmed.error.message)
                    progress(num_done, len(stored))
                    if await served.num_evictions() > evictions:
                        logger.warning("the cache is full; --chunk-cache-size makes it larger")
                        break
        except ApiError as error:
            logger.warning("stored documents are not computed at the start: %s", error.message)
            break
    return f"{num_computed:,} of {num_documents:,} documents ({num_tokens:,} tokens)"
