"""Document writer of this server: its threads, its length check, and the cached chunks of what is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from kvmosaic.api import length_check
from kvmosaic.api.document_writer import DocumentWriter
from kvmosaic.api.length_check import most_chunk_tokens
from kvmosaic.documents import DocumentDraft, StoredDocument
from kvmosaic.errors import ChunkCacheFull
from kvmosaic.extraction import extract_text
from kvmosaic.server.documents.cached import apply_draft, count_kept, drop_superseded
from kvmosaic.server.errors import ApiError, as_api_error
from kvmosaic.server.services import Services

if TYPE_CHECKING:
    from kvmosaic.llm import LLM

P = ParamSpec("P")
T = TypeVar("T")


class ServerWriter(DocumentWriter):
    """Stores documents of one tenant during one request."""

    def __init__(self, services: Services, tenant: str, request_id: str = "") -> None:
        super().__init__(services.documents, tenant, services.settings.max_body_bytes, "--max-body-bytes")
        self._services = services
        self._request_id = request_id

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs slow work in the tenant's turn."""
        return await self._services.in_thread(self.tenant, function, *args, **kwargs)

    async def extract(self, content: bytes, filename: str) -> str:
        """Returns the text of a file."""
        return await asyncio.wrap_future(
            self._services.file_threads.submit(self.tenant, extract_text, content, filename)
        )

    def check_length(self, draft: DocumentDraft, document_id: str | None) -> None:
        """Checks that a prompt of this server can hold a document."""
        check_length(self._services.llm, draft, document_id)

    async def update_cache(
        self, changed: Sequence[tuple[StoredDocument, DocumentDraft]]
    ) -> Mapping[str, Mapping[str, int]]:
        """Pins and ranks chunks as the drafts say, drops chunks of replaced texts, and counts what is kept of them."""
        for document, draft in changed:
            await apply_draft(self._services, self.tenant, document, draft)
        await drop_superseded(self._services)
        replaced = {document.id: (document, draft) for document, draft in changed if document.version > 1}
        kept = await count_kept(self._services, self.tenant, [*replaced.values()]) if replaced else {}
        return {document_id: each.described for document_id, each in kept.items()}

    def error_of(self, error: Exception) -> ApiError:
        """Returns the error that a client sees; the traceback of an unknown one goes to the log."""
        return as_api_error(error, self._request_id)


def check_length(llm: LLM, draft: DocumentDraft, document_id: str | None = None) -> None:
    """Checks that a document alone fits into a prompt of this server.

    Raises:
        InvalidPrompt: see `kvmosaic.api.length_check`.
        ChunkCacheFull: it has more tokens than the chunk cache.
    """
    pool, limit = llm.engine.kv_cache.chunk_pool, most_chunk_tokens(llm.encoder)
    cache_tokens = pool.num_blocks * pool.block_size if llm.has_chunk_cache else limit
    prompt = length_check.check_length(llm.encoder, draft, document_id, min(limit, cache_tokens))
    if prompt is None or not llm.has_chunk_cache:
        return
    num_tokens = sum(chunk.num_tokens for chunk in prompt.chunks)
    if sum(pool.blocks_for(chunk.num_tokens) for chunk in prompt.chunks) > pool.num_blocks:
        raise ChunkCacheFull(
            f"the document has {num_tokens} tokens, and the chunk cache of this server {cache_tokens} "
            "(--chunk-cache-size); store it in parts, or ask the operator of the server for a larger cache"
        )
