"""Documents of the front as routes see them: its threads, a length check by vLLM's model, and pins of its engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from starlette.types import Scope

from kvmosaic.api.errors import ApiError
from kvmosaic.api.served_documents import ServedDocuments, check_length, most_chunk_tokens
from kvmosaic.api.warming import WarmedDocument, WarmJob
from kvmosaic.documents import DocumentDraft, StoredDocument
from kvmosaic.errors import PromptTooLong
from kvmosaic.extraction import extract_text
from kvmosaic.integrations.vllm.front.pool_updates import PoolUpdates
from kvmosaic.integrations.vllm.front.settings import TENANT
from kvmosaic.integrations.vllm.front.warming import Warming
from kvmosaic.prompt import Document
from kvmosaic.web.errors import as_api_error

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.front.middleware import ComposedDocuments

P = ParamSpec("P")
T = TypeVar("T")


class FrontDocuments(ServedDocuments):
    """The documents of all clients of one vLLM, during one request."""

    num_warmed_at_once = 4

    def __init__(self, front: ComposedDocuments, scope: Scope) -> None:
        super().__init__(front.documents, TENANT, front.settings.max_body_bytes, "KVMOSAIC_MAX_BODY_BYTES")
        self._front = front
        self._scope = scope
        self._updates = PoolUpdates(front, scope)

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

    def error_of(self, error: Exception) -> ApiError:
        """Returns the error that a client sees."""
        return as_api_error(error)

    async def update_cache(
        self, changed: Sequence[tuple[StoredDocument, DocumentDraft]]
    ) -> Mapping[str, Mapping[str, int]]:
        """Sends pins and priorities to vLLM's engines; what they have cached of a text is unknown in this process."""
        claimed = [
            document
            for document, draft in changed
            if document.pinned or draft.pinned is not None or draft.priority is not None
        ]
        await self._updates.send(claimed)
        return {}

    async def update_pin(self, document: StoredDocument) -> None:
        """Sends the pin to vLLM's engines."""
        await self._updates.send([document])

    async def update_priority(self, document: StoredDocument) -> None:
        """Sends the priority to vLLM's engines."""
        await self._updates.send([document])

    async def drop_deleted(self, document: StoredDocument) -> None:
        """Releases the pin; the keys and values stay until vLLM evicts them."""
        await self._updates.send((), was_pinned=document.pinned)

    async def find_chunks(self, documents: Sequence[StoredDocument]) -> None:
        """None: this process does not see which blocks vLLM caches."""

    def check_warmable(self, model: str | None) -> None:
        """Nothing: vLLM itself answers for its models and its queue, document by document."""

    async def num_evictions(self) -> None:
        """None: this process does not see what vLLM evicts."""

    async def warm_one(self, job: WarmJob, index: int, document: Document | str) -> WarmedDocument:
        """Computes one document by a request of one token."""
        return await Warming(self._front, job, self._scope).run(index, document)
