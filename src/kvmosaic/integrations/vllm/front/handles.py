"""Document handles: documents that are stored once and then referenced by id."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.errors import (
    DocumentChanged,
    DocumentExists,
    DocumentStoreFull,
    DocumentTooLarge,
    InvalidDocument,
    UnknownDocument,
)
from kvmosaic.integrations.vllm.front.settings import FrontSettings
from kvmosaic.integrations.vllm.front.stored import DocumentBackend, FolderPlace, MemoryPlace, StoredDocument
from kvmosaic.prompt import Document
from kvmosaic.prompt.document_id import check_id
from kvmosaic.prompt.separator import check_unicode

MAX_TTL_SECONDS = 31_536_000
MAX_METADATA_PAIRS = 16
FIELDS = ("id", "text", "title", "metadata", "ttl_seconds", "refresh_ttl_on_hit", "pinned", "priority")


@dataclass(frozen=True, slots=True)
class DocumentDraft:
    """A document that a client wants to store; white space around text and title is stripped."""

    text: str
    title: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    ttl_seconds: int | None = None
    refresh_ttl_on_hit: bool = False

    @classmethod
    def read(cls, body: Mapping[str, Any], default_ttl: int | None) -> DocumentDraft:
        """Reads the body of a document.

        Raises:
            InvalidDocument: an unknown field, a wrong type, a value out of range, or one not supported inside vLLM.
        """
        if unknown := next((name for name in body if name not in FIELDS), None):
            raise InvalidDocument(f"a document has no field {unknown!r:.80}; its fields are {', '.join(FIELDS)}")
        if body.get("pinned") or body.get("priority") is not None:
            name = "pinned" if body.get("pinned") else "priority"
            raise InvalidDocument(
                f"{name} is {body[name]!r:.80}; vLLM's cache alone decides what stays in it: leave {name} out"
            )
        document = Document(body.get("text"), body.get("title"))  # type: ignore[arg-type]
        ttl = body.get("ttl_seconds", default_ttl)
        if ttl is not None and not (type(ttl) is int and 1 <= ttl <= MAX_TTL_SECONDS):
            raise InvalidDocument(
                f"ttl_seconds is {ttl!r:.80}; give a whole number from 1 to {MAX_TTL_SECONDS}, or null for ever"
            )
        refresh = body.get("refresh_ttl_on_hit", False)
        if not isinstance(refresh, bool):
            raise InvalidDocument(f"refresh_ttl_on_hit is {refresh!r:.80}; give true or false")
        return cls(document.text, document.title, _metadata(body.get("metadata")), ttl, refresh)


@dataclass(slots=True)
class Hits:
    """Read counter of a document in this process, and the time of the last read."""

    number: int = 0
    last: float | None = None


class Handles:
    """The stored documents of one server, or of several that share a folder.

    Every change holds the lock of the storage, so two servers never mix up versions. An expired document is not found
    any more, and is removed by the next change or list.
    """

    def __init__(
        self, place: DocumentBackend, settings: FrontSettings | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings or FrontSettings()
        self._place = place
        self._clock = clock
        self._hits: dict[str, Hits] = {}

    @classmethod
    def opened(cls, settings: FrontSettings) -> Handles:
        """Opens handles in the configured folder, or in memory."""
        folder = settings.documents_dir
        return cls(MemoryPlace() if folder is None else FolderPlace(folder), settings)

    def resolve(self, document_id: str) -> Document:
        """The text of a document for a prompt; counts a hit, and restarts its TTL if configured.

        Raises:
            UnknownDocument: there is none with this id, or it has expired.
        """
        document, now = self.get(document_id), self._clock()
        hits = self._hits.setdefault(document_id, Hits())
        hits.number, hits.last = hits.number + 1, now
        if document.refresh_ttl_on_hit:
            self._place.touch(document, now)
        return Document(document.text, document.title, document.id)

    def document(self, document_id: str) -> Document:
        """The text of a document, without counting a hit.

        Raises:
            UnknownDocument: see `resolve`.
        """
        document = self.get(document_id)
        return Document(document.text, document.title, document.id)

    def get(self, document_id: str) -> StoredDocument:
        """A document, without counting a hit.

        Raises:
            UnknownDocument: see `resolve`.
        """
        document = self._place.read(document_id)
        if document is None or document.has_expired(self._clock()):
            raise UnknownDocument(
                f"there is no document {document_id!r:.300}; it may be deleted or have expired: store it again"
            )
        return document

    def hits(self, document_id: str) -> Hits:
        """Read counter of a document in this process."""
        return self._hits.get(document_id, Hits())

    def create(self, draft: DocumentDraft, document_id: str | None = None) -> StoredDocument:
        """Stores a new document.

        Raises:
            InvalidDocument: an invalid id.
            DocumentExists: the id is taken; `put` replaces.
            DocumentTooLarge, DocumentStoreFull: a storage limit is exceeded.
        """
        document_id = f"doc-{secrets.token_hex(12)}" if document_id is None else check_id(document_id)
        with self._place.locked():
            if self._found(document_id) is not None:
                raise DocumentExists(
                    f"there is a document {document_id!r} already; replace it with PUT, or choose another id"
                )
            return self._put(document_id, draft, None)

    def put(self, document_id: str, draft: DocumentDraft, if_match: str | None = None) -> tuple[StoredDocument, bool]:
        """Stores a document under an id, replacing an existing one; returns whether it is new.

        Raises:
            DocumentChanged: the stored version is none of `if_match`, a header of ETags.
            InvalidDocument, DocumentTooLarge, DocumentStoreFull: as for `create`; the old document stays.
        """
        check_id(document_id)
        with self._place.locked():
            before = self._found(document_id)
            _check_match(document_id, before, if_match)
            return self._put(document_id, draft, before), before is None

    def delete(self, document_id: str, if_match: str | None = None) -> None:
        """Deletes a document; its blocks in vLLM's cache are evicted in the course of time.

        Raises:
            UnknownDocument: see `resolve`.
            DocumentChanged: see `put`.
        """
        with self._place.locked():
            _check_match(document_id, self.get(document_id), if_match)
            self._place.remove(document_id)
            self._hits.pop(document_id, None)

    def all(self) -> list[StoredDocument]:
        """All documents without their texts, in the order of creation; expired ones are removed."""
        kept, now = [], self._clock()
        for head in self._place.heads():
            if head.has_expired(now):
                self._drop_expired(head.id)
            else:
                kept.append(head)
        return sorted(kept, key=lambda head: (head.number, head.id))

    def _drop_expired(self, document_id: str) -> None:
        with self._place.locked():
            if (document := self._place.read(document_id)) is not None and document.has_expired(self._clock()):
                self._place.remove(document_id)
                self._hits.pop(document_id, None)

    def _found(self, document_id: str) -> StoredDocument | None:
        document = self._place.read(document_id)
        return None if document is None or document.has_expired(self._clock()) else document

    def _put(self, document_id: str, draft: DocumentDraft, before: StoredDocument | None) -> StoredDocument:
        num_bytes = len(draft.text.encode()) + len((draft.title or "").encode())
        others = [head for head in self.all() if head.id != document_id]
        self._check_room(num_bytes, others)
        now = self._clock()
        newest = max((head.number for head in others), default=0)
        document = StoredDocument(
            id=document_id,
            number=before.number if before else max(int(now * 1e6), newest + 1),
            version=before.version + 1 if before else 1,
            title=draft.title,
            created_at=before.created_at if before else now,
            updated_at=now,
            ttl_seconds=draft.ttl_seconds,
            refresh_ttl_on_hit=draft.refresh_ttl_on_hit,
            ttl_started_at=now,
            characters=len(draft.text),
            num_bytes=num_bytes,
            metadata=dict(draft.metadata),
            text=draft.text,
        )
        self._place.write(document)
        return document

    def _check_room(self, num_bytes: int, others: Sequence[StoredDocument]) -> None:
        settings = self.settings
        if num_bytes > settings.max_documents_bytes:
            raise DocumentTooLarge(
                f"title and text have {num_bytes} bytes; {settings.max_documents_bytes} may be stored in all: split it"
            )
        if len(others) >= settings.max_documents:
            raise DocumentStoreFull(
                f"{len(others)} documents are stored, which is the limit; delete some, or let them expire"
            )
        total = num_bytes + sum(other.num_bytes for other in others)
        if total > settings.max_documents_bytes:
            raise DocumentStoreFull(
                f"{num_bytes} bytes more make {total} bytes of stored text, the limit is "
                f"{settings.max_documents_bytes}; delete some documents, or let them expire"
            )


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    is_texts = isinstance(value, Mapping) and all(isinstance(entry, str) for entry in value.values())
    if not is_texts or len(value) > MAX_METADATA_PAIRS:
        raise InvalidDocument(f"metadata is {value!r:.80}; give an object of at most {MAX_METADATA_PAIRS} texts")
    for key, entry in value.items():
        if not 1 <= len(key) <= 64 or len(entry) > 512:
            raise InvalidDocument(
                f"a metadata key has 1 to 64 characters and its value at most 512; look at {key!r:.80}"
            )
        check_unicode(key + entry, InvalidDocument)
    return dict(value)


def _check_match(document_id: str, document: StoredDocument | None, if_match: str | None) -> None:
    if if_match is None:
        return
    tags = [tag.strip() for tag in if_match[:4_096].split(",")]
    if document is None or not ("*" in tags or f'"{document.version}"' in tags):
        stored = "is not stored" if document is None else f"has version {document.version}"
        raise DocumentChanged(f"the document {document_id!r} {stored}, which If-Match does not name; read it again")
