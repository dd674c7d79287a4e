"""Bodies and replies of /v1/documents:warm, which computes documents ahead of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from kvmosaic.api.documents import (
    CompanionsField,
    DocumentFields,
    DocumentId,
    FindDocumentsField,
    PreambleField,
    single_documents,
)
from kvmosaic.api.errors import ApiError, ErrorDetail
from kvmosaic.api.fields import Body, Name, Reply, Text
from kvmosaic.layout import ChunkContext, context_with
from kvmosaic.prompt import Document
from kvmosaic.prompt.patterns import FindDocuments, read_find_documents

MAX_WARM_IDS = 10_000

SystemText = Annotated[Text, Field(min_length=1, json_schema_extra={"pattern": r"\S"})]
Endpoint = Literal["/v1/chat/completions", "/v1/responses", "/v1/completions"]


class WarmOptions(Body):
    """For which prompts a document is computed."""

    system: Annotated[
        SystemText | None,
        Field(
            description="System text of the later prompts: a document is computed after it, and a cache hit only there."
        ),
    ] = None
    endpoint: Annotated[
        Endpoint | None,
        Field(description="Where it will be used; /v1/completions writes documents without the chat template."),
    ] = None
    chunk_context: Annotated[
        ChunkContext | None,
        Field(description="As the later requests say it: with none, a document is a cache hit after any system text."),
    ] = None
    model: Annotated[
        Name | None, Field(description="Which of the server's models the documents are for. Default: its first.")
    ] = None
    preamble: PreambleField = None
    companions: CompanionsField = None
    find_documents: Annotated[
        FindDocumentsField,
        Field(
            description="As the later requests say it, if they have the documents in the text of their messages: then "
            "the text of a document is computed alone, without title and template. Default: they name or send "
            "documents."
        ),
    ] = None
    stream: Annotated[bool | None, Field(description="Send an event for each document as it ends.")] = False

    @property
    def chat(self) -> bool | None:
        """Whether documents are rendered with a chat template; None: if the model has one."""
        return False if self.endpoint == "/v1/completions" else None


class WarmOneRequest(WarmOptions):
    """How to warm one document."""

    cache_salt: Annotated[str | None, Field(max_length=4_096)] = None


class WarmRequest(WarmOptions, DocumentFields):
    """What to warm: stored documents by `ids`, documents that are not stored, or (neither given) all stored ones.

    An empty list names none.
    """

    ids: Annotated[list[DocumentId] | None, Field(max_length=MAX_WARM_IDS)] = None

    def chosen(self, stored_ids: Callable[[], Iterable[str]]) -> tuple[Mapping[int, Document | str], tuple[str, ...]]:
        """Ids of stored documents, and texts, by place; and warnings. `stored_ids` returns the ids of all stored ones.

        As in a prompt, blank texts and repeats are left out, and other texts of one id get names of their own.

        Raises:
            InvalidDocument: an entry without text and id.
        """
        if self.ids is None and self.documents is None:
            return dict(enumerate(stored_ids())), ()
        found, warnings = single_documents(self.documents or ())
        chosen: dict[int, Document | str] = dict(enumerate(dict.fromkeys(self.ids or ())))
        first = len(chosen)
        return chosen | {first + place: document for place, document in found.items()}, warnings


@dataclass(frozen=True, slots=True)
class WarmJob:
    """Documents to compute, and the prompts to compute them for.

    Raises:
        InvalidConfig: `options` contradict each other, or name a pattern that does not exist.
    """

    documents: Mapping[int, Document | str]
    """By place: texts, or ids of stored documents, which are read just before they are computed."""
    options: WarmOptions
    salt: str = ""
    warnings: tuple[str, ...] = ()
    """What of the request was left out or changed."""
    chunk_context: ChunkContext | None = field(init=False)
    """`chunk_context` of the later requests; None: not set, and the server's setting applies."""
    find_documents: FindDocuments = field(init=False)
    """Their `find_documents`, if they have the documents in their texts."""

    def __post_init__(self) -> None:
        options = self.options
        object.__setattr__(self, "chunk_context", context_with(options.companions, options.chunk_context))
        object.__setattr__(self, "find_documents", read_find_documents(options.find_documents or ()))


@dataclass(frozen=True, slots=True)
class WarmedDocument:
    """Result of warming one document."""

    index: int
    id: str | None
    num_tokens: int = 0
    num_chunks: int = 0
    was_cached: bool = False
    milliseconds: float = 0.0
    error: ApiError | None = None


class WarmedObject(Reply):
    """How warming one document ended: its tokens, or an error."""

    object: Literal["document.warmed", "document.failed"]
    index: Annotated[int, Field(description="Place among the documents of the request.")]
    id: str | None
    tokens: int | None = None
    chunks: int | None = None
    was_cached: bool | None = None
    ms: float | None = None
    error: ErrorDetail | None = None

    @classmethod
    def of(cls, warmed: WarmedDocument) -> WarmedObject:
        """Describes the result for one document."""
        if warmed.error is not None:
            error = ErrorDetail(**warmed.error.body["error"])
            return cls(object="document.failed", index=warmed.index, id=warmed.id, error=error)
        return cls(
            object="document.warmed",
            index=warmed.index,
            id=warmed.id,
            tokens=warmed.num_tokens,
            chunks=warmed.num_chunks,
            was_cached=warmed.was_cached,
            ms=round(warmed.milliseconds, 3),
        )


class WarmSummary(Reply):
    """What warming came to; the last event of a stream."""

    object: Literal["documents.warmed"]
    num_documents: int = 0
    num_computed: int = 0
    num_cached: Annotated[int, Field(description="Found in the cache, nothing to compute.")] = 0
    num_failed: int = 0
    tokens: int = 0
    num_evicted: Annotated[
        int, Field(description="Chunks of yours that left the full cache meanwhile, perhaps of these documents.")
    ] = 0
    ms: Annotated[float, Field(description="From the first to the last.")] = 0.0
    warnings: Annotated[list[str] | None, Field(description="What of the request was left out or changed.")] = None
    data: Annotated[list[WarmedObject] | None, Field(description="By index; only without `stream`.")] = None

    @classmethod
    def of(cls, results: Iterable[WarmedDocument], seconds: float) -> WarmSummary:
        """The summary of all results, in the order of their documents.

        Raises:
            ApiError: none could be warmed; the first error.
        """
        ordered = sorted(results, key=lambda warmed: warmed.index)
        errors = [warmed.error for warmed in ordered if warmed.error is not None]
        if errors and len(errors) == len(ordered):
            raise errors[0]
        summary = cls.empty()
        for warmed in ordered:
            summary.add(warmed)
        summary.ms, summary.data = round(seconds * 1e3, 3), [WarmedObject.of(warmed) for warmed in ordered]
        return summary

    @classmethod
    def empty(cls) -> WarmSummary:
        """The summary before the first result."""
        return cls(
            object="documents.warmed", num_documents=0, num_computed=0, num_cached=0, num_failed=0, tokens=0, ms=0.0
        )

    def add(self, warmed: WarmedDocument) -> None:
        """Adds one result to the counts."""
        self.num_documents += 1
        self.num_failed += warmed.error is not None
        self.num_cached += warmed.error is None and warmed.was_cached
        self.num_computed += warmed.error is None and not warmed.was_cached
        self.tokens += warmed.num_tokens
