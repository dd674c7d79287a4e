"""Document store: the texts of all tenants, with versions and times to live."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count
from threading import RLock

from kvmosaic.documents.backend import DocumentBackend
from kvmosaic.documents.memory import DocumentPage, MemoryDocuments, Order
from kvmosaic.documents.names import label_in, label_of
from kvmosaic.documents.stored import DocumentDraft, Match, StoredDocument, StoredText
from kvmosaic.errors import (
    DocumentChanged,
    DocumentExists,
    DocumentStoreFull,
    DocumentTooLarge,
    UnknownDocument,
)
from kvmosaic.prompt.document import MAX_DOCUMENT_CHARACTERS
from kvmosaic.prompt.document_id import check_id

MAX_SUPERSEDED = 100_000
"""Maximum number of texts whose chunks wait to be dropped; chunks of further ones stay until they are evicted."""
MAX_IN_GRACE_PERIOD = 10_000
GRACE_SECONDS = 600.0
"""Seconds for which requests that began earlier may still compute a superseded text."""


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


@dataclass(frozen=True, slots=True)
class SupersededText:
    """A text that no new request can read; its chunks may be dropped."""

    tenant: str
    label: str


class DocumentStore:
    """The stored documents of all tenants, in memory or in another backend.

    Holds texts only. Their KV cache is in the chunk cache under the `label` of each text; texts that are replaced,
    deleted or expired are listed by `take_superseded`, whose caller drops their chunks.

    Every call about one tenant is atomic on any thread: bodies with long lists are read beside the event loop. A
    replaced text is gone from the store before `put` returns: `resolve` can only find the new one.
    """

    def __init__(
        self,
        *,
        default_ttl_seconds: float | None = 3_600,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] = time.time,
        make_id: Callable[[], str] = lambda: f"doc-{secrets.token_hex(12)}",
        open_backend: Callable[[str], DocumentBackend] = lambda tenant: MemoryDocuments(),
        has_labels: bool = True,
    ) -> None:
        """Creates an empty store.

        Args:
            default_ttl_seconds: TTL of documents created without one; None or 0: no expiry.
            limits: how much one tenant may store.
            clock: unix seconds.
            make_id: returns an id for a document created without one.
            open_backend: opens the documents of a tenant.
            has_labels: whether texts get labels; False where chunks are not found by their names.
        """
        self.default_ttl_seconds = round(default_ttl_seconds) if default_ttl_seconds else None
        self.limits = limits or StoreLimits()
        self._clock = clock
        self._make_id = make_id
        self._open_backend = open_backend
        self._has_labels = has_labels
        self._lock = RLock()
        """Guards what follows; documents are guarded by the lock of their tenant, which is acquired first."""
        self._by_tenant: dict[str, DocumentBackend] = {}
        self._text_numbers = count(1)
        self._superseded: deque[SupersededText] = deque(maxlen=MAX_SUPERSEDED)
        self._in_grace_period: deque[tuple[float, SupersededText]] = deque(maxlen=MAX_IN_GRACE_PERIOD)

    def create(self, tenant: str, draft: DocumentDraft, document_id: str | None = None) -> StoredDocument:
        """Stores a new document.

        Raises:
            InvalidDocument: an id that cannot be used.
            DocumentExists: the id is taken; `put` replaces.
            DocumentTooLarge, DocumentStoreFull: see `StoreLimits`.
        """
        document_id = self._make_id() if document_id is None else check_id(document_id)
        with self._documents(tenant).write_lock():
            if self._find(tenant, document_id) is not None:
                raise DocumentExists(
                    f"there is a document {document_id!r} already; replace it with PUT, or choose another id"
                )
            return self._put(tenant, document_id, draft)

    def put(
        self, tenant: str, document_id: str, draft: DocumentDraft, match: Match | None = None
    ) -> tuple[StoredDocument, bool]:
        """Creates or replaces the document with an id; returns whether it is new.

        A replacement keeps hits and creation time, and the pin unless the draft sets it.

        Raises:
            DocumentChanged: the stored version does not match `match`.
            InvalidDocument, DocumentTooLarge, DocumentStoreFull: as for `create`; the old document stays.
        """
        check_id(document_id)
        with self._documents(tenant).write_lock():
            before = self._find(tenant, document_id)
            _check_match(document_id, before, match)
            return self._put(tenant, document_id, draft), before is None

    def get(self, tenant: str, document_id: str) -> StoredDocument:
        """Returns a document without counting a hit.

        Raises:
            UnknownDocument: this tenant has none with this id, or it has expired.
        """
        document = self._find(tenant, document_id)
        if document is None:
            raise UnknownDocument(
                f"there is no document {document_id!r:.300}; it may be deleted or have expired: store it again"
            )
        return document

    def resolve(self, tenant: str, document_id: str) -> StoredText:
        """Returns the text of a document for a prompt; counts a hit and restarts its TTL if it was created so.

        Raises:
            UnknownDocument: see `get`.
        """
        with self._documents(tenant).read_lock():
            document = self.get(tenant, document_id)
            self._documents(tenant).hit(document, self._clock())
            return document.content

    def search(self, tenant: str, text: str) -> list[tuple[int, int, StoredText]]:
        """Returns the documents whose texts are part of a text: (start, end, document), in order; counts a hit of each.

        Texts of fewer than 32 characters are not searched, nor are documents in a folder.
        """
        with self._documents(tenant).read_lock():
            found = self._alive(tenant).search(text)
            for _, _, document in found:
                self._documents(tenant).hit(document, self._clock())
            return [(start, end, document.content) for start, end, document in found]

    def touched(self, tenant: str, document_ids: Iterable[str]) -> None:
        """Counts a hit for documents whose text was read by other means; ignores unknown ids."""
        with self._documents(tenant).read_lock():
            for document_id in document_ids:
                if (document := self._find(tenant, document_id)) is not None:
                    self._documents(tenant).hit(document, self._clock())

    def documents(self, tenant: str) -> list[StoredDocument]:
        """Returns all documents of a tenant, oldest first; those in a folder without their texts."""
        with self._documents(tenant).read_lock():
            documents = self._alive(tenant)
            return [documents.documents[documents.ids[number]] for number in documents.numbers]

    def page(self, tenant: str, *, limit: int = 20, after: str | None = None, order: Order = "desc") -> DocumentPage:
        """Returns some documents of a tenant in order of creation; see `MemoryDocuments.part`.

        Raises:
            UnknownDocument: `after` is not in this list.
        """
        with self._documents(tenant).read_lock():
            return self._alive(tenant).part(limit, after, order)

    def delete(self, tenant: str, document_id: str, match: Match | None = None) -> None:
        """Deletes a document.

        Raises:
            UnknownDocument: see `get`.
            DocumentChanged: the stored version does not match `match`.
        """
        with self._documents(tenant).write_lock():
            document = self.get(tenant, document_id)
            _check_match(document_id, document, match)
            self._drop(tenant, document)

    def set_pinned(self, tenant: str, document_id: str, pinned: bool) -> StoredDocument:
        """Pins or unpins a document. A pinned one does not expire; unpinning restarts its TTL.

        Raises:
            UnknownDocument: see `get`.
        """
        with self._documents(tenant).write_lock():
            document = self.get(tenant, document_id)
            if document.pinned and not pinned:
                document.ttl_started_at = self._clock()
            document.pinned = pinned
            self._documents(tenant).change(document)
            return document

    def set_priority(
        self, tenant: str, document_id: str, priority: float | None, match: Match | None = None
    ) -> StoredDocument:
        """Sets the eviction priority of the chunks of a document, 0 to 1, higher stays longer; None: 0.5.

        Raises:
            UnknownDocument: see `get`.
            DocumentChanged: the stored version does not match `match`.
            InvalidDocument: a priority outside its range.
        """
        with self._documents(tenant).write_lock():
            document = self.get(tenant, document_id)
            _check_match(document_id, document, match)
            document.content = replace(document.content, priority=priority)
            self._documents(tenant).change(document)
            return document

    def expire(self, tenant: str | None = None) -> int:
        """Deletes expired documents, of one tenant or of all; returns their number."""
        num_dropped = 0
        for name in [tenant] if tenant is not None else list(self._by_tenant):
            with self._documents(name).read_lock():
                _, expired = self._documents(name).alive(self._clock())
                for document in expired:
                    self._retire(name, document)
                num_dropped += len(expired)
        return num_dropped

    def usage(self, tenant: str | None = None) -> StoreUsage:
        """Returns how much a tenant stores, or (None) all tenants together."""
        listed = [self._alive(name) for name in (list(self._by_tenant) if tenant is None else [tenant])]
        num_documents = sum(len(documents.numbers) for documents in listed)
        return StoreUsage(num_documents, sum(documents.num_bytes for documents in listed))

    def owner(self, tenant: str, chunk_name: str) -> StoredDocument | None:
        """Returns the document whose current text has this label, if there is one."""
        label, document_id = label_in(chunk_name)
        document = self._documents(tenant).get(document_id) if document_id else None
        return document if document is not None and document.content.label == label else None

    def take_superseded(self) -> list[SupersededText]:
        """Returns texts that were replaced, deleted or expired since the last call."""
        with self._lock:
            superseded, now = list(self._superseded), self._clock()
            self._superseded.clear()
            self._in_grace_period.extend((now, text) for text in superseded)
            return superseded

    def in_grace_period(self) -> list[SupersededText]:
        """Returns texts taken in the last ten minutes: requests that began before may have computed them since."""
        with self._lock:
            while self._in_grace_period and self._in_grace_period[0][0] + GRACE_SECONDS <= self._clock():
                self._in_grace_period.popleft()
            return [text for _, text in self._in_grace_period]

    def check_invariants(self) -> None:
        """Checks the documents of every tenant (for tests)."""
        for tenant in self._by_tenant:
            documents = self._alive(tenant)
            documents.check_invariants()
            assert len(documents.numbers) <= self.limits.max_documents and documents.num_bytes <= self.limits.max_bytes

    def _documents(self, tenant: str) -> DocumentBackend:
        with self._lock:
            if tenant not in self._by_tenant:
                self._by_tenant[tenant] = self._open_backend(tenant)
            return self._by_tenant[tenant]

    def _alive(self, tenant: str) -> MemoryDocuments:
        """Removes expired documents; returns all others."""
        with self._documents(tenant).read_lock():
            documents, expired = self._documents(tenant).alive(self._clock())
            for document in expired:
                self._retire(tenant, document)
            return documents

    def _find(self, tenant: str, document_id: str) -> StoredDocument | None:
        documents = self._documents(tenant)
        document = documents.get(document_id)
        if document is None or not document.has_expired(self._clock()):
            return document
        with documents.write_lock():
            document = documents.get(document_id)  # another process may have replaced it
            if document is not None and document.has_expired(self._clock()):
                self._drop(tenant, document)
                return None
            return document

    def _drop(self, tenant: str, document: StoredDocument) -> None:
        self._documents(tenant).remove(document)
        self._retire(tenant, document)

    def _retire(self, tenant: str, document: StoredDocument) -> None:
        if document.content.label:
            with self._lock:
                self._superseded.append(SupersededText(tenant, document.content.label))

    def _put(self, tenant: str, document_id: str, draft: DocumentDraft) -> StoredDocument:
        documents, listed, now = self._documents(tenant), self._alive(tenant), self._clock()
        before = documents.get(document_id)
        priority = before.content.priority if draft.priority is None and before is not None else draft.priority
        content = StoredText(draft.text, draft.title, document_id, priority)
        num_bytes = content.count_bytes()
        self._check_room(listed, content, num_bytes, before)
        if before is not None and before.content.reads_like(content):
            same = before.content  # its chunks stay valid
            content = same if same.priority == priority else replace(same, priority=priority)
        elif self._has_labels:
            content = replace(content, label=label_of(document_id, next(self._text_numbers)))
        was_pinned = before is not None and before.pinned
        document = StoredDocument(
            id=document_id,
            number=before.number if before else documents.next_number(listed, now),
            version=documents.next_version(document_id),
            content=content,
            metadata=dict(draft.metadata),
            created_at=before.created_at if before else now,
            updated_at=now,
            ttl_seconds=draft.ttl_seconds,
            refresh_ttl_on_hit=draft.refresh_ttl_on_hit,
            pinned=was_pinned if draft.pinned is None else draft.pinned,
            ttl_started_at=now,
            num_characters=len(content.text),
            num_bytes=num_bytes,
            hits=before.hits if before else 0,
            last_used_at=before.last_used_at if before else None,
        )
        documents.put(document)
        if before is not None and before.content.label != content.label:
            self._retire(tenant, before)
        return document

    def _check_room(
        self, listed: MemoryDocuments, content: StoredText, num_bytes: int, before: StoredDocument | None
    ) -> None:
        limits = self.limits
        if len(content.text) > limits.max_characters:
            raise DocumentTooLarge(
                f"the text has {len(content.text)} characters; at most {limits.max_characters} are allowed: split it"
            )
        if num_bytes > limits.max_bytes:
            raise DocumentTooLarge(
                f"title and text have {num_bytes} bytes; a tenant may store {limits.max_bytes} in all: split it"
            )
        num_documents = len(listed.numbers)
        if before is None and num_documents >= limits.max_documents:
            raise DocumentStoreFull(
                f"{num_documents} documents are stored, which is the limit; delete some, or let them expire"
            )
        total = listed.num_bytes + num_bytes - (before.num_bytes if before else 0)
        if total > limits.max_bytes:
            raise DocumentStoreFull(
                f"{num_bytes} bytes more make {total} bytes of stored text, the limit is {limits.max_bytes}; delete "
                "some documents, or let them expire"
            )


def _check_match(document_id: str, document: StoredDocument | None, match: Match | None) -> None:
    if match is not None and not match.fits(document):
        stored = "is not stored" if document is None else f"has version {document.version}"
        raise DocumentChanged(f"the document {document_id!r} {stored}, which If-Match does not name; read it again")
