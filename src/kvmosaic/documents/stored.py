"""Stored documents: one text with its metadata, its names in the cache, and how many there may be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from kvmosaic.errors import InvalidDocument
from kvmosaic.prompt import Document
from kvmosaic.prompt.document import MAX_DOCUMENT_CHARACTERS
from kvmosaic.prompt.separator import check_unicode

MAX_TTL_SECONDS = 31_536_000
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


@dataclass(frozen=True, slots=True)
class StoredText(Document):
    """A text as a prompt takes it; its chunks have the label as their name."""

    label: str = ""

    @property
    def name(self) -> str | None:
        """The label, unique to this text."""
        return self.label or self.id or self.title

    def count_bytes(self) -> int:
        """Returns the bytes of title and text in UTF-8."""
        return len(self.text.encode()) + len((self.title or "").encode())

    def reads_like(self, other: Document) -> bool:
        """Whether a model would read the same."""
        return (self.title, self.text) == (other.title, other.text)


class TextHead(StoredText):
    """A stored text without its text, as in lists of documents whose texts are on a disk."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Checks nothing: the whole text was checked when it was stored."""


class DocumentValues(TypedDict, total=False):
    """What can be changed of a stored document beside its text."""

    priority: float | None
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DocumentDraft:
    """Content that a client wants to store, stripped of white space around text and title.

    Raises:
        InvalidDocument: an empty or too long text or title, too much metadata, or a TTL outside its range.
    """

    text: str
    title: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    ttl_seconds: int | None = None
    """None: no expiry."""
    refresh_ttl_on_hit: bool = False
    pinned: bool | None = None
    """None: not pinned, or unchanged by a replacement."""
    priority: float | None = None
    """Eviction priority of its chunks, 0 to 1, higher stays longer; None: 0.5, or unchanged by a replacement."""

    def __post_init__(self) -> None:
        Document(self.text, self.title, priority=self.priority)
        ttl = self.ttl_seconds
        if ttl is not None and not 1 <= ttl <= MAX_TTL_SECONDS:
            raise InvalidDocument(f"ttl_seconds must be between 1 and {MAX_TTL_SECONDS} or null for never, got {ttl}")
        if len(self.metadata) > MAX_METADATA_PAIRS:
            raise InvalidDocument(f"metadata has {len(self.metadata)} pairs; at most {MAX_METADATA_PAIRS} are allowed")
        for key, value in self.metadata.items():
            if not 1 <= len(key) <= MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
                raise InvalidDocument(
                    f"a metadata key has 1 to {MAX_METADATA_KEY} characters and its value at most "
                    f"{MAX_METADATA_VALUE}; look at {key!r:.80}"
                )
            check_unicode(key + value, InvalidDocument)
        if any("\0" in text for text in (self.title or "", *self.metadata, *self.metadata.values())):
            raise InvalidDocument("a document's title or metadata hold a NUL character; remove it")


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """One document of one tenant, as it was when it was read."""

    id: str
    number: int
    """Number in the tenant's order of creation; a replacement keeps it."""
    version: int
    """Number of times that something was stored under this id so far, from 1."""
    content: StoredText
    metadata: Mapping[str, str]
    created_at: float
    """Unix seconds, as are the other times."""
    updated_at: float
    ttl_seconds: int | None
    refresh_ttl_on_hit: bool
    pinned: bool
    expires_at: float | None
    """None: never, or not while it is pinned."""
    num_characters: int
    """Characters of the text."""
    num_bytes: int
    """Bytes of title and text in UTF-8."""
    change: int
    """Number of the tenant's change that wrote it, which orders what processes know of it."""
    hits: int = 0
    """Number of requests that read it."""
    last_used_at: float | None = None


@dataclass(frozen=True, slots=True)
class Match:
    """Versions that a change applies to: the header If-Match."""

    versions: frozenset[int] = frozenset()
    is_any: bool = False
    """Any version matches, if the document exists."""

    @classmethod
    def from_header(cls, header: str) -> Match:
        """Parses `*` or a list of ETags; foreign ETags match nothing, as the standard requires."""
        if header.strip() == "*":
            return cls(is_any=True)
        tags = (tag.strip() for tag in header[:4_096].split(","))
        inner = (tag[1:-1] for tag in tags if len(tag) >= 3 and tag[0] == tag[-1] == '"')
        return cls(frozenset(int(tag) for tag in inner if tag.isascii() and tag.isdigit() and len(tag) <= 18))

    def fits(self, version: int | None) -> bool:
        """Whether the stored version matches; None: nothing is stored."""
        return version is not None and (self.is_any or version in self.versions)


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Limits on what one tenant may store."""

    max_documents: int = 10_000
    max_bytes: int = 2**28
    """Maximum bytes of all titles and texts in UTF-8."""
    max_characters: int = MAX_DOCUMENT_CHARACTERS
    """Maximum characters of one text."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Amount stored, of one tenant or of all."""

    num_documents: int
    num_bytes: int
    last_change: int
    """Grows with every change of a document; hits are none."""


@dataclass(frozen=True, slots=True)
class SupersededText:
    """A text that was replaced, or that no new request can read: then its chunks may be dropped."""

    tenant: str
    label: str


_LABEL = re.compile(r"((.{1,256}) \[stored [0-9]+\])((?: \([0-9]+/[0-9]+\))?)")


def label_of(document_id: str, text_number: int) -> str:
    """Returns the name of the chunks of one text of a document in the cache.

    Every text has its own number. So the chunks of a replaced text, which a running request may still compute, are
    never taken for those of the new one; nor are the chunks of a document that a prompt contains inline under the same
    id.
    """
    return f"{document_id} [stored {text_number}]"


def shown_name(name: str) -> str:
    """Returns the name to display for a chunk or segment: the id alone, with the part of a split document."""
    found = _LABEL.fullmatch(name)
    return found[2] + found[3] if found else name


def label_in(name: str) -> tuple[str, str]:
    """Returns label and id from the name of a chunk or of a part of a document; two empty texts if it has none."""
    found = _LABEL.fullmatch(name)
    return (found[1], found[2]) if found else ("", "")
