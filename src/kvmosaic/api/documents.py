"""Documents in bodies of prompts, and bodies and replies of /v1/documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from kvmosaic.api.errors import ApiError
from kvmosaic.api.fields import INTEGRAL, MAX_DOCUMENTS, Body, Name, Plain, Reply, Text
from kvmosaic.documents import DocumentDraft, DocumentPage, DocumentStore, StoredDocument, StoredText
from kvmosaic.documents.store import Named
from kvmosaic.documents.stored import (
    MAX_METADATA_KEY,
    MAX_METADATA_PAIRS,
    MAX_METADATA_VALUE,
    MAX_TTL_SECONDS,
    DocumentValues,
)
from kvmosaic.errors import InvalidConfig, InvalidDocument
from kvmosaic.prompt import Document
from kvmosaic.prompt.companions import MAX_COMPANION_CHARACTERS, MAX_COMPANIONS, read_companions
from kvmosaic.prompt.document import (
    ID_PATTERN,
    MAX_ID_CHARACTERS,
    MAX_POSITION,
    REFUSED_ID_PATTERN,
    GivenDocuments,
    distinct_documents,
)
from kvmosaic.prompt.found_documents import DocumentFinder, FoundDocument
from kvmosaic.prompt.patterns import document_finder, read_find_documents
from kvmosaic.prompt.preamble import MAX_PREAMBLE_TOKENS, MAX_RULE_CHARACTERS
from kvmosaic.prompt.segment import MAX_SALT_CHARACTERS
from kvmosaic.prompt.settings import PromptSettings

MAX_LIST = 1_000

DocumentId = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_ID_CHARACTERS,
        pattern=ID_PATTERN,
        json_schema_extra={"not": {"pattern": REFUSED_ID_PATTERN}},
        description="Any text of one line; no '.' or '..' between slashes, no verb such as ':warm' at the end.",
    ),
]
MetadataKey = Annotated[str, Field(min_length=1, max_length=MAX_METADATA_KEY)]
MetadataValue = Annotated[str, Field(max_length=MAX_METADATA_VALUE)]


DocumentPriority = Annotated[
    float,
    Field(ge=0, le=1, description="How much it should stay in a full cache: 0 leaves first, 1 last. Default: 0.5."),
]


class DocumentPart(Body):
    """A document that the answer may read, or the id of a stored one.

    `id`, `title` and `text` are what chat templates, Cohere and vLLM use. `doc_id` is another name of `id`; `metadata`
    is the caller's and never shown to the model.
    """

    id: Name | Annotated[int, Field(ge=0, le=2**63 - 1), INTEGRAL] | None = None
    doc_id: Name | Annotated[int, Field(ge=0, le=2**63 - 1), INTEGRAL] | None = None
    version: Annotated[
        Annotated[int, Field(ge=1, le=2**31), INTEGRAL] | None,
        Field(description="Of a stored document: the version to read. Default: the current one."),
    ] = None
    title: Name | None = None
    text: Text | None = None
    priority: DocumentPriority | None = None
    sees: Annotated[
        list[Name | Annotated[int, Field(ge=0, le=MAX_DOCUMENTS), INTEGRAL]] | None,
        Field(
            max_length=MAX_DOCUMENTS,
            description="Earlier documents that this one sees besides the system text: ids, or indexes from 0. It is "
            "then cached for these documents only.",
        ),
    ] = None
    position_offset: Annotated[
        Annotated[int, Field(ge=0, le=MAX_POSITION), INTEGRAL] | None,
        Field(description="Position of its first token, with position_strategy absolute."),
    ] = None
    metadata: Plain | None = None

    @property
    def name(self) -> str | None:
        """Its id, as a text."""
        name = self.id if self.id is not None else self.doc_id
        return None if name is None else str(name)

    def settled(self, stored: Document) -> Document:
        """A stored document with what the body says of it."""
        priority = stored.priority if self.priority is None else self.priority
        return replace(stored, priority=priority, sees=tuple(self.sees or ()), position_offset=self.position_offset)


def _check_preamble(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("pattern:"):
        raise PydanticCustomError(
            "preamble", "a pattern is set by the operator (--preamble); choose 'auto', 'all', a number or 'before:TEXT'"
        )
    return value


PreambleField = Annotated[
    Annotated[str, Field(max_length=MAX_RULE_CHARACTERS)] | Annotated[int, Field(ge=0, le=MAX_PREAMBLE_TOKENS)] | None,
    AfterValidator(_check_preamble),
    Field(
        description="How much of the system text documents see, so that they are reused where its end changes: auto, "
        "all, a number of tokens, or before:TEXT. Default: the server's setting.",
        examples=["before:Today is"],
    ),
]


def _read_companions(value: list[str] | None) -> list[str] | None:
    try:
        return None if value is None else list(read_companions(value))
    except InvalidConfig as error:
        raise PydanticCustomError("companions", "{message}", {"message": str(error)}) from None


_Companion = Annotated[str, Field(max_length=MAX_COMPANION_CHARACTERS)]
CompanionsField = Annotated[
    Annotated[list[_Companion], Field(max_length=MAX_COMPANIONS)] | None,
    AfterValidator(_read_companions),
    Field(
        description="Texts that documents see when they are computed, and that the prompt does not contain: best three "
        "documents of the same kind. The second document sees one of them, the third two, and so on. Default: the "
        "server's setting."
    ),
]


FindDocumentsField = Annotated[str, Field(max_length=256)] | Annotated[list[Name], Field(max_length=64)] | None
"""Names of `find_documents`, separated by commas or in a list; `read_find_documents` checks them."""


class DocumentFields(Body):
    """Documents and who may share them."""

    documents: Annotated[
        list[DocumentPart | Text] | None,
        Field(
            max_length=MAX_DOCUMENTS,
            description="Documents to answer from: texts, {id?, title?, text}, or {id} of a stored document.",
            examples=[[{"id": "ferry", "text": "The ferry goes to Oak Island."}]],
        ),
    ] = None
    cache_salt: Annotated[
        str | None,
        Field(max_length=MAX_SALT_CHARACTERS, description="Requests with different salts share nothing in the cache."),
    ] = None
    preamble: PreambleField = None
    find_documents: Annotated[
        FindDocumentsField,
        Field(
            description="Finds documents in the text of messages, if the request has none of its own: auto, agents, "
            "patterns (or names of patterns), stored, none. Default: the server's setting.",
            examples=["patterns,stored"],
        ),
    ] = None

    def finder(self, settings: PromptSettings, store: DocumentStore, tenant: str) -> DocumentFinder:
        """What finds documents in the text of this request.

        Raises:
            InvalidConfig: a name that `find_documents` does not have.
        """
        names = read_find_documents(settings.find_documents if self.find_documents is None else self.find_documents)
        return document_finder(names, settings.document_pattern, _StoredSearch(store, tenant))


@dataclass(frozen=True, slots=True)
class _StoredSearch:
    """Finds the stored documents of a tenant in a text."""

    store: DocumentStore
    tenant: str

    def find(self, text: str) -> list[FoundDocument]:
        found = self.store.search(self.tenant, text)
        return [FoundDocument(start, end, "stored", document.name, document.priority) for start, end, document in found]


def document_texts(
    parts: Sequence[DocumentPart | str],
    resolve: Callable[[Sequence[Named]], Sequence[StoredText]],
    *,
    strict: bool = False,
) -> GivenDocuments:
    """Returns the documents of a body, with the texts of stored ones; see `distinct_documents`.

    Args:
        parts: documents, or ids of stored ones.
        resolve: returns the stored documents of ids and versions.
        strict: refuse blank texts, and leave repeated ids to the prompt encoder, which refuses them.

    Raises:
        UnknownDocument: an id that is not stored.
        InvalidDocument: no text and no id, or `sees` names an id of several texts.
    """
    whole, blank, given = _read_parts(parts, strict=strict)
    named = [whole[place] for place, document in given.items() if document is None]
    stored = iter(resolve([(part.name or "", part.version) for part in named]) if named else ())
    documents = {place: document or whole[place].settled(next(stored)) for place, document in given.items()}
    if strict:
        return GivenDocuments(tuple(documents.values()), tuple(documents))
    return distinct_documents(documents, blank)


def single_documents(parts: Sequence[DocumentPart | str]) -> tuple[dict[int, Document | str], tuple[str, ...]]:
    """The documents of a body, each for itself: by place, texts or ids of stored ones; and warnings as for prompts.

    Raises:
        InvalidDocument: no text and no id.
    """
    whole, blank, given = _read_parts(parts, strict=False)
    alone = {place: replace(each, sees=(), position_offset=None) for place, each in given.items() if each is not None}
    texts = distinct_documents(alone, blank)
    found: dict[int, Document | str] = dict(zip(texts.places, texts.documents, strict=True))
    found |= {place: whole[place].name or "" for place, each in given.items() if each is None}
    return dict(sorted(found.items())), texts.warnings


def _read_parts(
    parts: Sequence[DocumentPart | str], *, strict: bool
) -> tuple[dict[int, DocumentPart], dict[int, str | None], dict[int, Document | None]]:
    """By place: all parts, the ids of blank ones, and the documents of the others (None: a stored one)."""
    whole = {place: DocumentPart(text=part) if isinstance(part, str) else part for place, part in enumerate(parts)}
    blank = {
        place: part.name
        for place, part in whole.items()
        if not strict and part.text is not None and not part.text.strip()
    }
    return whole, blank, {place: _given_document(part, place) for place, part in whole.items() if place not in blank}


def _given_document(part: DocumentPart, index: int) -> Document | None:
    """The document whose text the body has; None: a stored one."""
    name = part.name
    if part.text is not None:
        try:
            return Document(part.text, part.title, name, part.priority, tuple(part.sees or ()), part.position_offset)
        except InvalidDocument as error:
            raise InvalidDocument(f"document number {index + 1}: {error}", document=index) from None
    if name is None:
        raise InvalidDocument(
            f"document number {index + 1} has neither a text nor the id of a stored document; give one of them",
            document=index,
        )
    return None


class DocumentContent(Body):
    """What is stored under an id; what is left out gets its default, also when a document is replaced."""

    text: Annotated[
        Text,
        Field(min_length=1, json_schema_extra={"pattern": r"\S"}, description="White space around it is removed."),
    ]
    title: Annotated[Name | None, Field(description="A line before the text; the model reads it.")] = None
    metadata: Annotated[
        dict[MetadataKey, MetadataValue] | None,
        Field(max_length=MAX_METADATA_PAIRS, description="Yours; the model never reads it."),
    ] = None
    ttl_seconds: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_TTL_SECONDS,
            description="Life of the document; null: for ever. Default: for ever, or the server's setting.",
        ),
    ] = None
    refresh_ttl_on_hit: Annotated[bool, Field(description="Its time begins anew whenever a request reads it.")] = False
    pinned: Annotated[
        bool | None,
        Field(description="Keep its chunks in the cache; it does not expire. Default: false, or as it was before."),
    ] = None
    priority: Annotated[
        float | None,
        Field(
            ge=0,
            le=1,
            description="How much its chunks should stay in a full cache: 0 leaves first, 1 last, with the server's "
            "--eviction priority. Default: 0.5, or as it was before.",
        ),
    ] = None

    def draft(self, store: DocumentStore) -> DocumentDraft:
        """Returns the draft to store.

        Raises:
            InvalidDocument: a text or title that cannot be stored.
        """
        has_ttl = "ttl_seconds" in self.model_fields_set
        return DocumentDraft(
            text=self.text,
            title=self.title,
            metadata=self.metadata or {},
            ttl_seconds=self.ttl_seconds if has_ttl else store.default_ttl_seconds,
            refresh_ttl_on_hit=self.refresh_ttl_on_hit,
            pinned=self.pinned,
            priority=self.priority,
        )


class DocumentChange(Body):
    """What may be changed of a stored document without sending it again: at least one of these."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    priority: Annotated[
        float | None,
        Field(ge=0, le=1, description="How much its chunks should stay in a full cache; null: 0.5. Default: as it is."),
    ] = None
    metadata: Annotated[
        dict[MetadataKey, MetadataValue] | None,
        Field(
            max_length=MAX_METADATA_PAIRS, description="All its pairs from now on; null: none. Default: as they are."
        ),
    ] = None

    @model_validator(mode="after")
    def _check_change(self) -> DocumentChange:
        if not self.model_fields_set:
            raise PydanticCustomError("change", "it changes nothing; send priority or metadata")
        return self

    @property
    def values(self) -> DocumentValues:
        """What the body has."""
        values: DocumentValues = {}
        if "priority" in self.model_fields_set:
            values["priority"] = self.priority
        if "metadata" in self.model_fields_set:
            values["metadata"] = self.metadata or {}
        return values


class NewDocument(DocumentContent):
    """A document to be created; without an id it gets one."""

    id: DocumentId | None = None

    def check_id(self, name: str) -> None:
        """Checks that it may be stored under an id in the address, which the body may repeat.

        Raises:
            ApiError: the body names another one.
        """
        if self.id not in (None, name):
            message = f"the address names the document {name!r:.300}, the body {self.id!r}; leave it out"
            raise ApiError(400, message, param="id")


class ChunkObject(Reply):
    """One cached run of keys and values of a document: there is one for each system text and salt, and each part."""

    tier: Literal["device"]
    state: Literal["computing", "ready"]
    part: Annotated[str | None, Field(description="Of a document that was split, such as '1/3'.")]
    tokens: int
    blocks: int
    bytes: int
    hits: Annotated[int, Field(description="Requests that found it.")]
    in_use: Annotated[int, Field(description="Requests that read it now.")]
    pinned: bool
    salted: Annotated[bool, Field(description="Whether it belongs to requests with a cache_salt.")]
    compute_ms: float


class DocumentVersion(Reply):
    """A version of a document that can still be read; one that changed no text is not listed."""

    version: int
    title: str | None
    bytes: int

    @classmethod
    def of(cls, document: StoredDocument) -> DocumentVersion:
        """Describes one."""
        return cls(version=document.version, title=document.content.title, bytes=document.num_bytes)


NewTokens = Annotated[
    int | None, Field(description="Of a replaced text, where the earlier one is cached: tokens of the new one.")
]
KeptTokens = Annotated[
    int | None, Field(description="Of these, the tokens before the edit, which the next read does not compute.")
]


class DocumentObject(Reply):
    """A stored document. Its text is sent only where one document is asked for."""

    id: str
    object: Literal["document"]
    title: str | None
    metadata: dict[str, str]
    version: Annotated[int, Field(description="Also its ETag; counts replacements.")]
    characters: int
    bytes: int
    created_at: Annotated[int, Field(description="Unix seconds.")]
    updated_at: int
    expires_at: Annotated[int | None, Field(description="Null: never, or not while it is pinned.")]
    ttl_seconds: int | None
    refresh_ttl_on_hit: bool
    pinned: bool
    priority: Annotated[float, Field(description="How much its chunks should stay in a full cache, 0 to 1.")]
    hits: Annotated[int, Field(description="Times that a request named it.")]
    last_used_at: int | None
    tokens: NewTokens = None
    kept_tokens: KeptTokens = None
    text: str | None = None
    chunks: Annotated[
        list[ChunkObject] | None, Field(description="Where its keys and values are; empty: not computed yet.")
    ] = None
    versions: Annotated[
        list[DocumentVersion] | None, Field(description="The texts that can be read, the current one first.")
    ] = None

    @classmethod
    def of(cls, document: StoredDocument, **details: Any) -> DocumentObject:
        """Describes a document, with `text` and `chunks` if given."""
        return cls(
            id=document.id,
            object="document",
            title=document.content.title,
            metadata=dict(document.metadata),
            version=document.version,
            characters=document.num_characters,
            bytes=document.num_bytes,
            created_at=int(document.created_at),
            updated_at=int(document.updated_at),
            expires_at=None if document.expires_at is None else int(document.expires_at),
            ttl_seconds=document.ttl_seconds,
            refresh_ttl_on_hit=document.refresh_ttl_on_hit,
            pinned=document.pinned,
            priority=0.5 if document.content.priority is None else document.content.priority,
            hits=document.hits,
            last_used_at=None if document.last_used_at is None else int(document.last_used_at),
            **details,
        )


class DocumentList(Reply):
    """Some documents in the order of creation."""

    object: Literal["list"]
    data: list[DocumentObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next_after: Annotated[
        str | None,
        Field(description="`after` for the next part; unlike last_id, it stays good when documents are deleted."),
    ]

    @classmethod
    def of(cls, page: DocumentPage, data: list[DocumentObject]) -> DocumentList:
        """Describes one page of documents."""
        return cls(
            object="list",
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=page.has_more,
            next_after=page.next_after,
        )


class DeletedDocument(Reply):
    """What is left of a document."""

    id: str
    object: Literal["document.deleted"]
    deleted: Literal[True]
