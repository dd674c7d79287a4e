"""Document writer of the front: its threads, and a length check by the model that vLLM serves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from starlette.exceptions import HTTPException
from starlette.types import Scope

from kvmosaic.api.document_writer import DocumentWriter
from kvmosaic.api.errors import ApiError, known_error
from kvmosaic.api.length_check import check_length, most_chunk_tokens
from kvmosaic.documents import DocumentDraft, StoredDocument
from kvmosaic.errors import PromptTooLong
from kvmosaic.extraction import extract_text
from kvmosaic.integrations.vllm.front.pool_updates import PoolUpdates
from kvmosaic.integrations.vllm.front.settings import TENANT

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.front.middleware import ComposedDocuments

P = ParamSpec("P")
T = TypeVar("T")
_log = logging.getLogger(__name__)


class FrontWriter(DocumentWriter):
    """Stores documents during one request."""

    def __init__(self, front: ComposedDocuments, scope: Scope) -> None:
        super().__init__(front.documents, TENANT, front.settings.max_body_bytes, "KVMOSAIC_MAX_BODY_BYTES")
        self._front = front
        self._scope = scope

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs slow work in one of the front's threads."""
        return await self._front.in_thread(function, *args, **kwargs)

    async def extract(self, content: bytes, filename: str) -> str:
        """Returns the text of a file; prompts do not wait for it."""
        return await self._front.in_file_thread(extract_text, content, filename)

    def check_length(self, draft: DocumentDraft, document_id: str | None) -> None:
        """Checks that a prompt of the served model can hold a document, all of its parts together.

        Raises:
            InvalidPrompt: it is too long.
        """
        try:
            encoder = self._front.renderer(self._scope).encoder
        except ApiError:  # documents are stored for other servers, too
            return
        prompt = check_length(encoder, draft, document_id, most_chunk_tokens(encoder))
        if prompt is None or encoder.max_positions is None:
            return
        num_tokens = sum(segment.num_tokens for segment in prompt.segments)
        if num_tokens >= encoder.max_positions:  # one is left for the answer
            raise PromptTooLong(
                f"a prompt with this document alone has {num_tokens} tokens, and vLLM takes {encoder.max_positions} "
                "with the answer (--max-model-len); store it in parts"
            )

    async def update_cache(
        self, changed: Sequence[tuple[StoredDocument, DocumentDraft]]
    ) -> Mapping[str, Mapping[str, int]]:
        """Sends pins and priorities to vLLM's engines; what they have cached of a text is unknown in this process."""
        claimed = [
            document
            for document, draft in changed
            if document.pinned or draft.pinned is not None or draft.priority is not None
        ]
        await PoolUpdates(self._front, self._scope).send(claimed)
        return {}

    def error_of(self, error: Exception) -> ApiError:
        """Returns the error that a client sees."""
        return error_of(error)


def error_of(error: Exception) -> ApiError:
    """Returns the error that a client sees; the traceback of an unknown one goes to the log."""
    if isinstance(error, HTTPException):  # a damaged form
        return ApiError(error.status_code, str(error.detail))
    if (known := known_error(error)) is not None:
        return known
    _log.error("a request for documents failed", exc_info=error)
    return ApiError(500, "internal error", type="server_error", code="internal_error")
