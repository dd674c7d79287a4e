"""Served documents: what routes of documents need of the server that answers a request."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from itertools import islice
from typing import ParamSpec, TypeVar

from kvmosaic.api.documents import ChunkObject, DocumentContent
from kvmosaic.api.errors import ApiError
from kvmosaic.api.warming import WarmedDocument, WarmJob
from kvmosaic.documents import DocumentDraft, DocumentStore, Match, StoredDocument
from kvmosaic.extraction import FileText
from kvmosaic.prompt import Document, Prompt, PromptEncoder

MAX_WRAPPER_TOKENS = 256
"""Tokens that a chat template may add to a document, for the estimate."""
P = ParamSpec("P")
T = TypeVar("T")


class ServedDocuments(ABC):
    """The documents of one tenant, with the limits, threads and cache of a server: our own, or vLLM with the front."""

    num_warmed_at_once = 8
    """Enough to fill steps, few enough to leave room for other requests."""

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
    async def extract(self, content: bytes, filename: str) -> FileText:
        """Runs `extract_text` beside the event loop, and beside other slow work: it may wait for minutes."""

    @abstractmethod
    def check_length(self, draft: DocumentDraft, document_id: str | None) -> None:
        """Checks that a prompt can hold a document; in a thread.

        Raises:
            InvalidPrompt, ChunkCacheFull: it is too long.
        """

    @abstractmethod
    def error_of(self, error: Exception) -> ApiError:
        """Returns the error that a client sees."""

    @abstractmethod
    async def update_cache(
        self, changed: Sequence[tuple[StoredDocument, DocumentDraft]]
    ) -> Mapping[str, Mapping[str, int]]:
        """Updates the cache after documents were stored.

        Returns:
            by id, `tokens` and `kept_tokens` of replaced texts, where this server knows them.
        """

    @abstractmethod
    async def update_pin(self, document: StoredDocument) -> None:
        """Pins or unpins what is cached of a document, as it says."""

    @abstractmethod
    async def update_priority(self, document: StoredDocument) -> None:
        """Gives what is cached of a document its priority."""

    @abstractmethod
    async def drop_deleted(self, document: StoredDocument) -> None:
        """Drops what is cached of a document that was deleted, as far as this server can."""

    @abstractmethod
    async def find_chunks(self, documents: Sequence[StoredDocument]) -> Mapping[str, list[ChunkObject]] | None:
        """Returns the cached chunks of documents by id; None: this server does not see them."""

    @abstractmethod
    def check_warmable(self, model: str | None) -> None:
        """Raises what warming for a model would raise, before anything is read.

        Raises:
            ChunkCacheOff, ApiError: nothing can be warmed now.
        """

    @abstractmethod
    async def num_evictions(self) -> int | None:
        """Returns how many chunks of the tenant have been evicted so far; None: this server does not know."""

    @abstractmethod
    async def warm_one(self, job: WarmJob, index: int, document: Document | str) -> WarmedDocument:
        """Computes one document, a text or the id of a stored one; a failure is part of the result."""

    async def warm(self, job: WarmJob) -> AsyncGenerator[WarmedDocument, None]:
        """Computes documents that are not cached, a few at a time; yields the result of each as it ends.

        Closing the generator, or cancelling the task that reads it, aborts the rest. One that fails does not stop the
        others.

        Raises:
            ApiError: see `check_warmable`.
        """
        waiting = iter(job.documents.items())
        tasks: set[asyncio.Task[WarmedDocument]] = set()
        try:
            while True:
                for index, document in islice(waiting, self.num_warmed_at_once - len(tasks)):
                    tasks.add(asyncio.create_task(self.warm_one(job, index, document), name=f"warm-{index}"))
                if not tasks:
                    return
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for warmed in sorted((task.result() for task in done), key=lambda one: one.index):
                    yield warmed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def delete(self, document_id: str, match: Match | None = None) -> None:
        """Deletes a document and what is cached of it.

        Raises:
            UnknownDocument, DocumentChanged: see `DocumentStore.delete`.
        """
        document = await self.in_thread(self.store.delete, self.tenant, document_id, match)
        await asyncio.shield(self.drop_deleted(document))  # the client may disconnect halfway

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


def most_chunk_tokens(encoder: PromptEncoder) -> int:
    """Returns the most tokens of a chunk, by the settings and by the model's positions."""
    limit = encoder.settings.max_chunk_tokens
    return limit if encoder.max_positions is None else min(limit, encoder.max_positions)


def check_length(encoder: PromptEncoder, draft: DocumentDraft, document_id: str | None, limit: int) -> Prompt | None:
    """Checks that a document alone fits into a prompt; returns that prompt, or None if the text is short.

    A short text is not tokenized: it has at most one token for each of its bytes.

    Args:
        encoder: the encoder of prompts.
        draft: the document.
        document_id: its id, for errors.
        limit: tokens up to which it is short.

    Raises:
        ChunkTooLong: it has more tokens than a chunk may have, and documents are not split.
        PromptTooLong: it has more tokens than the model has positions.
        TooManyChunks: it has more parts than a prompt may have.
    """
    if _max_tokens(draft, limit) <= limit:
        return None
    return encoder.encode_documents([Document(draft.text, draft.title, document_id)])


def _max_tokens(draft: DocumentDraft, limit: int) -> int:
    """An upper bound of the tokens of a text, without its bytes where its characters are already too many."""
    texts = (draft.text, draft.title or "")
    num_characters = sum(map(len, texts)) + MAX_WRAPPER_TOKENS
    return num_characters if num_characters > limit else sum(len(text.encode()) for text in texts) + MAX_WRAPPER_TOKENS
