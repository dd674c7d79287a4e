"""Document writer of this server: its threads, its length check, and the cached chunks of what is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from kvmosaic.api.document_writer import DocumentWriter
from kvmosaic.documents import DocumentDraft, StoredDocument
from kvmosaic.extraction import extract_text
from kvmosaic.server.documents.cached import apply_draft, count_kept, drop_superseded
from kvmosaic.server.documents.length_check import check_length
from kvmosaic.server.errors import ApiError, as_api_error
from kvmosaic.server.services import Services

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
