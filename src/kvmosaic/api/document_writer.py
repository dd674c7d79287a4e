"""Document writer: what storing documents needs of the server that receives them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from kvmosaic.api.documents import DocumentContent
from kvmosaic.api.errors import ApiError
from kvmosaic.documents import DocumentDraft, DocumentStore, StoredDocument

P = ParamSpec("P")
T = TypeVar("T")


class DocumentWriter(ABC):
    """The documents of one tenant, with the limits and threads of a server; our own, or the front inside vLLM."""

    def __init__(self, store: DocumentStore, tenant: str, max_body_bytes: int, body_setting: str) -> None:
        """`body_setting`: what the operator calls `max_body_bytes`, for errors."""
        self.store = store
        self.tenant = tenant
        self.max_body_bytes = max_body_bytes
        self.body_setting = body_setting

    @abstractmethod
    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs slow work beside the event loop."""

    @abstractmethod
    async def extract(self, content: bytes, filename: str) -> str:
        """Runs `extract_text` beside the event loop, and beside other slow work: it may wait for minutes."""

    @abstractmethod
    def check_length(self, draft: DocumentDraft, document_id: str | None) -> None:
        """Checks that a prompt can hold a document; in a thread.

        Raises:
            InvalidPrompt, ChunkCacheFull: it is too long.
        """

    @abstractmethod
    async def update_cache(
        self, changed: Sequence[tuple[StoredDocument, DocumentDraft]]
    ) -> Mapping[str, Mapping[str, int]]:
        """Updates the cache after documents were stored or deleted.

        Returns:
            by id, `tokens` and `kept_tokens` of replaced texts, where this server knows them.
        """

    @abstractmethod
    def error_of(self, error: Exception) -> ApiError:
        """Returns the error that a client sees."""

    def accepted(self, body: DocumentContent, document_id: str | None) -> DocumentDraft:
        """Returns the draft of a body, if a request of this server could read it; in a thread.

        Raises:
            InvalidDocument: a text or title that cannot be stored.
            InvalidPrompt, ChunkCacheFull: it is too long, see `check_length`.
        """
        draft, limits = body.draft(self.store), self.store.limits
        if len(draft.text) <= min(limits.max_characters, limits.max_bytes):  # the store refuses longer ones
            self.check_length(draft, document_id)
        return draft
