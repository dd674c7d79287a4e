"""Document store: the texts of all tenants, with versions and times to live."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Literal

from sqlalchemy import Connection, func, or_, select, update

from kvmosaic.documents.changes import TenantChanges, last_used_version
from kvmosaic.documents.database import DELETED, DOCUMENTS, TENANTS, TEXTS, DocumentDatabase
from kvmosaic.documents.rows import (
    DELETED_SINCE,
    EARLIER_TEXTS,
    HEADS,
    HEADS_BY_ID,
    TEXT_OF_VERSION,
    WHOLE,
    WHOLE_BY_ID,
    WHOLE_CHANGED,
    AnyRow,
    TextIndex,
    content_of,
    document_of,
    is_one,
    text_of,
)
from kvmosaic.documents.stored import (
    DocumentDraft,
    DocumentValues,
    Match,
    StoredDocument,
    StoredText,
    StoreLimits,
    StoreUsage,
    SupersededText,
    TextHead,
    label_in,
    label_of,
)
from kvmosaic.errors import (
    DocumentChanged,
    DocumentDamaged,
    DocumentExists,
    DocumentStoreUnavailable,
    KVMosaicError,
    UnknownDocument,
)
from kvmosaic.prompt.companions import MAX_COMPANIONS, MAX_STORED_CHARACTERS, STORED
from kvmosaic.prompt.document import check_id

MAX_SUPERSEDED = 100_000
"""Maximum number of texts whose chunks wait to be dropped; chunks of further ones stay until they are evicted."""
MAX_IN_GRACE_PERIOD = 10_000
GRACE_SECONDS = 600.0
"""Seconds for which requests that began earlier may still compute a superseded text."""
HITS_SECONDS = 5.0
"""Seconds after which hits are written to the database."""
MAX_SEARCH_CHARACTERS = 256
logger = logging.getLogger("kvmosaic.documents")
_USAGE = (TENANTS.c.num_documents, TENANTS.c.num_bytes, TENANTS.c.last_change)
_BATCH = 500
"""Ids in one statement."""

Order = Literal["asc", "desc"]
Named = tuple[str, int | None]
"""Id of a stored document, and one of its versions; None: the current one."""


@dataclass(frozen=True, slots=True)
class DocumentPage:
    """One page of a list, and where the next begins."""

    documents: tuple[StoredDocument, ...]
    has_more: bool

    @property
    def next_after(self) -> str | None:
        """The `after` of the next page; None: this was the last."""
        return f"~{self.documents[-1].number}" if self.has_more else None


@dataclass(slots=True)
class _Hits:
    """Hits of one document that are not yet written."""

    number: int
    last_used_at: float


@dataclass(slots=True)
class _SearchedTexts:
    """The texts of one tenant by their content, as of one change."""

    index: TextIndex
    change: int


class DocumentStore:
    """The stored documents of all tenants, in a database.

    Holds texts only. Their KV cache is in the chunk cache under the `label` of each text; texts that are no longer
    current are listed by `take_superseded`, whose caller drops the chunks of texts that no document owns.

    Every call is atomic on any thread and in any process that uses the same database. After `put` returns, requests
    read the new text; the old one is read by requests that name its version, until `version_seconds` after the last.
    """

    def __init__(
        self,
        place: Path | str | None = None,
        *,
        default_ttl_seconds: float | None = None,
        version_seconds: float = 3_600,
        limits: StoreLimits | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Opens the documents at a place; see `DocumentDatabase`.

        Args:
            place: folder of a SQLite file; or URL of a PostgreSQL database; None: in memory.
            default_ttl_seconds: TTL of documents created without one; None or 0: no expiry.
            version_seconds: how long a replaced text stays readable by its version; 0: it is gone at once.
            limits: how much one tenant may store.
            clock: unix seconds; by default the system's time, and for TTLs one that does not jump with it.

        Raises:
            InvalidConfig: the place cannot be used.
        """
        self.default_ttl_seconds = round(default_ttl_seconds) if default_ttl_seconds else None
        self.version_seconds = version_seconds
        self.limits = limits or StoreLimits()
        self._database = DocumentDatabase(place)
        self._wall: Callable[[], float] = clock or time.time
        self._clock: Callable[[], float] = clock or self._database.clock
        self._lock = Lock()
        """Guards what follows."""
        self._hits: dict[tuple[str, str], _Hits] = {}
        self._hits_written_at = time.monotonic()
        self._superseded: deque[SupersededText] = deque(maxlen=MAX_SUPERSEDED)
        self._in_grace_period: deque[tuple[float, SupersededText]] = deque(maxlen=MAX_IN_GRACE_PERIOD)
        self._search_lock = Lock()
        self._searched: dict[str, _SearchedTexts] = {}

    def create(self, tenant: str, draft: DocumentDraft, document_id: str | None = None) -> StoredDocument:
        """Stores a new document.

        Raises:
            InvalidDocument: an id that cannot be used.
            DocumentExists: the id is taken; `put` replaces.
            DocumentTooLarge, DocumentStoreFull: see `StoreLimits`.
            DocumentStoreUnavailable: the database cannot be written to; so for all methods.
        """
        document_id = _new_id() if document_id is None else check_id(document_id)
        with self._changes(tenant) as (changes, connection):
            changes.read([document_id])
            if changes.version(document_id) is not None:
                raise DocumentExists(
                    f"there is a document {document_id!r} already; replace it with PUT, or choose another id"
                )
            changes.put(document_id, draft)
            return self._written(changes, connection, tenant, [document_id])[document_id]

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
        with self._changes(tenant) as (changes, connection):
            changes.read([document_id])
            version = changes.version(document_id)
            _check_match(document_id, version, match)
            changes.put(document_id, draft)
            return self._written(changes, connection, tenant, [document_id])[document_id], version is None

    def put_many(
        self, tenant: str, drafts: Sequence[tuple[str | None, DocumentDraft]]
    ) -> list[StoredDocument | KVMosaicError]:
        """Creates or replaces documents in one transaction.

        Args:
            tenant: whose they are.
            drafts: ids and contents; None: an id is made.

        Returns:
            For each the document, without its text, or why it was refused. Of those with the same id, the last one
            that can be stored counts.
        """
        named = [(_new_id() if document_id is None else document_id, draft) for document_id, draft in drafts]
        refused = dict[int, KVMosaicError]()
        stored = dict[str, StoredDocument]()
        with self._changes(tenant) as (changes, connection):
            for start in range(0, len(named), _BATCH):
                by_id = dict[str, list[int]]()
                for index, (document_id, _) in enumerate(named[start : start + _BATCH], start):
                    by_id.setdefault(document_id, []).append(index)
                names = list(filter(_is_storable, by_id))
                changes.read(names)
                for document_id, indexes in by_id.items():
                    for index in reversed(indexes):  # the last one that can be stored, and no other, is written
                        try:
                            check_id(document_id)
                            changes.put(document_id, named[index][1])
                            break
                        except KVMosaicError as error:
                            refused[index] = error
                changes.finish()
                stored |= self._by_id(connection, tenant, names, has_text=False)
        return [refused.get(index) or stored[name] for index, (name, _) in enumerate(named)]

    def get(self, tenant: str, document_id: str, version: int | None = None) -> StoredDocument:
        """Returns a document without counting a hit.

        Args:
            tenant: whose it is.
            document_id: its id.
            version: an earlier version, of which title and text are returned; None: the current one.

        Raises:
            UnknownDocument: this tenant has none with this id, or it has expired; or it has no such version any more.
        """
        with self._database.read() as connection:
            return self._named(connection, tenant, [(document_id, version)])[0]

    def resolve(self, tenant: str, named: Sequence[Named]) -> list[StoredText]:
        """Returns the texts of documents for a prompt; counts hits and restarts the TTL of those created so.

        Raises:
            UnknownDocument: see `get`.
        """
        with self._database.read() as connection:
            documents = self._named(connection, tenant, named)
            earlier = [
                (each.id, each.version)
                for each, (_, version) in zip(documents, named, strict=True)
                if version is not None
            ]
        if earlier and self.version_seconds:
            with _tolerated("an earlier text is not kept longer"):
                self._keep_earlier(tenant, earlier)
        self._hit(tenant, documents)
        return [document.content for document in documents]

    def search(self, tenant: str, text: str) -> list[tuple[int, int, StoredText]]:
        """Returns the documents whose texts are part of a text: (start, end, document), in order; counts a hit of each.

        Texts of fewer than 32 characters are not searched.
        """
        with self._database.read() as connection:
            index = self._index(connection, tenant)
        places = [] if index is None else index.find(text)  # takes seconds in a long text: others must not wait for it
        with self._database.read() as connection:
            documents = self._by_id(connection, tenant, [name for _, _, name in places], skips_damaged=True)
        found = list[tuple[int, int, StoredText]]()
        for start, end, name in places:
            document = documents.get(name)
            if document is not None and document.content.text == text[start:end]:  # neither expired nor replaced
                found.append((start, end, document.content))
        self._hit(tenant, documents.values())
        return found

    def companions(
        self, tenant: str, setting: str | Sequence[str], named: Sequence[str] | None
    ) -> Sequence[str] | None:
        """Texts that a tenant's documents see (None: as the setting says); counts no hits.

        The texts that a request names; or, with the setting "stored", its first short documents, with titles.
        """
        if named is not None or setting != STORED:
            return named
        short = WHOLE.where(DOCUMENTS.c.num_characters <= MAX_STORED_CHARACTERS)
        first = short.order_by(DOCUMENTS.c.number).limit(MAX_COMPANIONS)
        with self._database.read() as connection:
            rows = connection.execute(first, {"tenant": tenant, "now": self._clock()}).all()
        found = list[str]()
        for row in rows:
            with _tolerated("it is no companion"):
                found.append(content_of(row).plain_text)
        return tuple(found) or None

    def documents(self, tenant: str) -> list[StoredDocument]:
        """Returns all documents of a tenant, oldest first, without their texts."""
        with self._database.read() as connection:
            rows = connection.execute(HEADS.order_by(DOCUMENTS.c.number), {"tenant": tenant, "now": self._clock()})
            return [self._document(tenant, row) for row in rows]

    def check_stored(self, tenant: str, document_ids: Sequence[str]) -> None:
        """Checks that documents are stored.

        Raises:
            UnknownDocument: the first that is not; see `get`.
        """
        known = self.stored_ids(tenant, document_ids)
        if (missing := next((name for name in document_ids if name not in known), None)) is not None:
            raise _unknown(missing)

    def stored_ids(self, tenant: str, document_ids: Sequence[str]) -> set[str]:
        """Returns those of these ids under which a document is stored."""
        with self._database.read() as connection:
            return set(self._by_id(connection, tenant, document_ids, has_text=False))

    def page(
        self,
        tenant: str,
        *,
        limit: int = 20,
        after: str | None = None,
        order: Order = "desc",
        search: str = "",
        ids: Sequence[str] | None = None,
    ) -> DocumentPage:
        """Returns some documents of a tenant in order of creation, without their texts.

        Whatever is created or deleted between two pages, no other document is left out or listed twice.

        Args:
            tenant: whose they are.
            limit: maximum number of documents.
            after: the id of the last document seen (it may have been deleted since), or a `next_after`.
            order: by creation.
            search: part of their ids or titles, in any case.
            ids: only those of them that have one of these ids; None: all.

        Raises:
            UnknownDocument: `after` is not in this list.
        """
        number, is_ascending = DOCUMENTS.c.number, order == "asc"
        heads = HEADS.order_by(number if is_ascending else number.desc()).limit(limit + 1)
        if not _is_storable(search):
            return DocumentPage((), has_more=False)
        if search:
            part = search[:MAX_SEARCH_CHARACTERS]
            heads = heads.where(
                or_(DOCUMENTS.c.id.icontains(part, autoescape=True), TEXTS.c.title.icontains(part, autoescape=True))
            )
        if ids is not None:
            heads = heads.where(DOCUMENTS.c.id.in_(list(filter(_is_storable, ids))))
        with self._database.read() as connection:
            if after is not None:
                place = _place(connection, tenant, after)
                heads = heads.where(number > place if is_ascending else number < place)
            rows = connection.execute(heads, {"tenant": tenant, "now": self._clock()}).all()
        return DocumentPage(tuple(self._document(tenant, row) for row in rows[:limit]), len(rows) > limit)

    def versions(self, tenant: str, document_id: str) -> list[StoredDocument]:
        """Returns the versions of a document with a text of their own that can be read, the newest first.

        Raises:
            UnknownDocument: see `get`.
        """
        with self._database.read() as connection:
            document = self._named(connection, tenant, [(document_id, None)])[0]
            content = document.content
            head = TextHead("", content.title, content.id, content.priority, label=content.label)
            values = {"tenant": tenant, "id": document_id, "now": self._clock()}
            earlier = [
                replace(
                    document,
                    version=row.version,
                    content=replace(head, title=row.title, label=label_of(document_id, row.number)),
                    num_bytes=row.num_bytes,
                )
                for row in connection.execute(EARLIER_TEXTS, values)
            ]
        return [replace(document, content=head), *earlier]

    def delete(self, tenant: str, document_id: str, match: Match | None = None) -> StoredDocument:
        """Deletes a document with all its versions; returns it.

        Raises:
            UnknownDocument: see `get`.
            DocumentChanged: the stored version does not match `match`.
        """
        with self._changes(tenant, frees=True) as (changes, connection):
            row = self._head(connection, tenant, document_id, match)
            changes.remove(row)
        with self._lock:
            self._hits.pop((tenant, document_id), None)
        return self._document(tenant, row)

    def set_pinned(self, tenant: str, document_id: str, pinned: bool) -> StoredDocument:
        """Pins or unpins a document. A pinned one does not expire; unpinning restarts its TTL.

        Raises:
            UnknownDocument: see `get`.
        """
        with self._changes(tenant) as (changes, connection):
            row = self._head(connection, tenant, document_id)
            if row.pinned != pinned:
                expires_at = changes.expiry(row.ttl_seconds, pinned=pinned)
                changes.update(document_id, pinned=pinned, expires_at=expires_at)
            return self._document(tenant, self._head(connection, tenant, document_id))

    def change(
        self, tenant: str, document_id: str, values: DocumentValues, match: Match | None = None
    ) -> StoredDocument:
        """Changes what belongs to a document beside its text; its version stays.

        Raises:
            UnknownDocument: see `get`.
            DocumentChanged: the stored version does not match `match`.
            InvalidDocument: a priority outside its range, or metadata beyond its limits.
        """
        DocumentDraft("any text", **values)
        with self._changes(tenant) as (changes, connection):
            self._head(connection, tenant, document_id, match)
            changes.update(document_id, **values)
            return self._document(tenant, self._head(connection, tenant, document_id))

    def expire(self, tenant: str | None = None, *, is_short: bool = False) -> int:
        """Deletes expired documents and replaced texts, of one tenant or of all; returns the number of documents.

        Args:
            tenant: whose; None: those of all tenants.
            is_short: whether to wait for a busy database for a second only.
        """
        now = self._clock()
        with self._database.read() as connection:
            due = {
                name
                for table in (DOCUMENTS, TEXTS)
                for name in connection.execute(
                    select(table.c.tenant).where(table.c.expires_at <= now).distinct()
                ).scalars()
            }
        num_documents = 0
        for name in due if tenant is None else due & {tenant}:
            with self._changes(name, is_short=is_short, frees=True) as (changes, _):
                num_documents += changes.num_expired
        return num_documents

    def usage(self, tenant: str | None = None) -> StoreUsage:
        """Returns how much a tenant stores, or (None) all tenants together; replaced texts do not count."""
        with _tolerated("expired documents are still counted"):
            self.expire(tenant, is_short=True)
        sums = select(*(func.coalesce(func.sum(column), 0) for column in _USAGE))
        with self._database.read() as connection:
            row = connection.execute(sums if tenant is None else sums.where(TENANTS.c.tenant == tenant)).one()
        return StoreUsage(*map(int, row))

    def owners(self, tenant: str, chunk_names: Iterable[str]) -> dict[str, StoredDocument]:
        """Returns the documents that have a readable text with these labels, by name of the chunk, without texts."""
        labels = {name: label_in(name) for name in chunk_names}
        found = dict[str, StoredDocument]()
        with self._database.read() as connection:
            documents = self._by_id(connection, tenant, [name for _, name in labels.values() if name], has_text=False)
            for chunk_name, (label, document_id) in labels.items():
                if (document := documents.get(document_id)) is None:
                    continue
                values = {"tenant": tenant, "id": document_id, "now": self._clock()}
                if document.content.label == label or any(
                    label_of(document_id, row.number) == label for row in connection.execute(EARLIER_TEXTS, values)
                ):
                    found[chunk_name] = document
        return found

    def take_superseded(self) -> list[SupersededText]:
        """Returns texts that are no longer current since the last call; `owners` says which can still be read."""
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

    def save(self, *, is_short: bool = False) -> None:
        """Writes hits that are not yet in the database, and its clock.

        Args:
            is_short: whether to wait for a busy database for a second only.

        Raises:
            DocumentStoreUnavailable: hits that are not written are written the next time.
        """
        with self._lock:
            hits, self._hits = self._hits, {}
            self._hits_written_at = time.monotonic()
        by_tenant = dict[str, list[tuple[str, _Hits]]]()
        for (tenant, document_id), counted in hits.items():
            by_tenant.setdefault(tenant, []).append((document_id, counted))
        try:
            while by_tenant:
                tenant, counts = next(iter(by_tenant.items()))
                self._write_hits(tenant, counts, is_short)
                del by_tenant[tenant]
        finally:
            self._count_again((tenant, *each) for tenant, counts in by_tenant.items() for each in counts)
        self._database.save_clock(is_short=is_short)

    def close(self) -> None:
        """Writes what is not yet written, if the database can be written to, and closes it."""
        with _tolerated("the last hits are lost"):
            self.save(is_short=True)
        self._database.close()

    def check_invariants(self) -> None:
        """Checks sums and texts of every tenant against each other (for tests)."""
        with self._database.read() as connection:
            for counted in connection.execute(select(TENANTS)).all():
                rows = connection.execute(select(DOCUMENTS).where(DOCUMENTS.c.tenant == counted.tenant)).all()
                texts = connection.execute(select(TEXTS).where(TEXTS.c.tenant == counted.tenant)).all()
                assert len(rows) == counted.num_documents <= self.limits.max_documents
                assert sum(row.num_bytes for row in rows) == counted.num_bytes
                assert sum(text.num_bytes for text in texts if text.expires_at is not None) == counted.num_earlier_bytes
                assert counted.num_bytes + counted.num_earlier_bytes <= self.limits.max_bytes
                current = {(text.id, text.number) for text in texts if text.expires_at is None}
                assert current == {(row.id, row.text_number) for row in rows}
                assert {text.id for text in texts} == {row.id for row in rows}

    @contextmanager
    def _changes(
        self, tenant: str, *, is_short: bool = False, frees: bool = False
    ) -> Iterator[tuple[TenantChanges, Connection]]:
        """A transaction that begins by removing what has expired; texts are superseded once it is on the disk."""
        with self._database.write(tenant, is_short=is_short, frees=frees) as connection:
            changes = TenantChanges(
                connection,
                tenant,
                now=self._clock(),
                wall=self._wall(),
                limits=self.limits,
                version_seconds=self.version_seconds,
            )
            yield changes, connection
            changes.finish()
        if changes.retired:
            with self._lock:
                self._superseded.extend(SupersededText(tenant, label) for label in changes.retired)

    def _written(
        self, changes: TenantChanges, connection: Connection, tenant: str, ids: Sequence[str]
    ) -> dict[str, StoredDocument]:
        changes.finish()
        return self._by_id(connection, tenant, ids)

    def _named(self, connection: Connection, tenant: str, named: Sequence[Named]) -> list[StoredDocument]:
        """The documents with these ids, in this order."""
        known, documents = self._by_id(connection, tenant, [name for name, _ in named]), list[StoredDocument]()
        for document_id, version in named:
            document = known.get(document_id)
            if document is None:
                raise _unknown(document_id)
            is_current = version is None or version == document.version
            documents.append(document if is_current else self._earlier(connection, tenant, document, version or 0))
        return documents

    def _earlier(self, connection: Connection, tenant: str, document: StoredDocument, version: int) -> StoredDocument:
        """The document as it was in an earlier version, as far as its text goes."""
        values = {"tenant": tenant, "id": document.id, "version": version}
        row = connection.execute(TEXT_OF_VERSION, values).one_or_none()
        is_gone = row is None or (row.expires_at is not None and row.expires_at <= self._clock())
        if row is None or is_gone or version > document.version:
            raise UnknownDocument(
                f"the document {document.id!r:.300} has version {document.version}; version {version} cannot be read. "
                f"Replaced texts stay {self.version_seconds:.0f} s after their last use; leave version out"
            )
        text = text_of(row)
        content = replace(document.content, text=text, title=row.title, label=label_of(document.id, row.number))
        return replace(document, version=version, content=content, num_characters=len(text), num_bytes=row.num_bytes)

    def _head(self, connection: Connection, tenant: str, document_id: str, match: Match | None = None) -> AnyRow:
        """The row of a document that is stored and matches, without its text."""
        values = {"tenant": tenant, "now": self._clock(), "ids": [document_id]}
        row = connection.execute(HEADS_BY_ID, values).one_or_none() if _is_storable(document_id) else None
        if row is None:
            raise _unknown(document_id)
        _check_match(document_id, row.version, match)
        return row

    def _by_id(
        self,
        connection: Connection,
        tenant: str,
        ids: Sequence[str],
        *,
        has_text: bool = True,
        skips_damaged: bool = False,
    ) -> dict[str, StoredDocument]:
        """The documents with these ids, as far as they are stored."""
        found, names = dict[str, StoredDocument](), list(filter(_is_storable, dict.fromkeys(ids)))
        for start in range(0, len(names), _BATCH):
            values = {"tenant": tenant, "now": self._clock(), "ids": names[start : start + _BATCH]}
            for row in connection.execute(WHOLE_BY_ID if has_text else HEADS_BY_ID, values):
                with _tolerated("it is not found in prompts") if skips_damaged else nullcontext():
                    found[row.id] = self._document(tenant, row)
        return found

    def _document(self, tenant: str, row: AnyRow) -> StoredDocument:
        """The document of a row, with hits that are not yet written."""
        document = document_of(row, content_of(row), drift=self._drift())
        waiting = self._hits.get((tenant, row.id))
        if waiting is None:
            return document
        return replace(document, hits=document.hits + waiting.number, last_used_at=waiting.last_used_at)

    def _write_hits(self, tenant: str, counts: Iterable[tuple[str, _Hits]], is_short: bool) -> None:
        with self._database.write(tenant, is_short=is_short) as connection:
            for document_id, counted in counts:
                values = {"hits": DOCUMENTS.c.hits + counted.number, "last_used_at": counted.last_used_at}
                connection.execute(update(DOCUMENTS).where(is_one(DOCUMENTS, tenant, document_id)).values(values))

    def _count_again(self, unwritten: Iterable[tuple[str, str, _Hits]]) -> None:
        """Adds hits that could not be written to those since."""
        with self._lock:
            for tenant, document_id, counted in unwritten:
                since = self._hits.setdefault((tenant, document_id), _Hits(0, counted.last_used_at))
                since.number += counted.number

    def _drift(self) -> float:
        """Seconds by which the system's clock has jumped ahead of the clock of `expires_at`."""
        drift = self._wall() - self._clock()
        return drift if abs(drift) > HITS_SECONDS else 0.0

    def _hit(self, tenant: str, documents: Iterable[StoredDocument]) -> None:
        """Counts a hit of documents, and restarts their TTL if they were created so."""
        now, restarted = self._wall(), list[StoredDocument]()
        with self._lock:
            for document in documents:
                counted = self._hits.setdefault((tenant, document.id), _Hits(0, now))
                counted.number, counted.last_used_at = counted.number + 1, now
                if document.refresh_ttl_on_hit and document.expires_at is not None:
                    restarted.append(document)
            is_due = time.monotonic() - self._hits_written_at >= HITS_SECONDS
        with _tolerated("hits are not counted yet"):
            if restarted:
                self._restart(tenant, restarted)
            if is_due:
                self.save(is_short=True)

    def _restart(self, tenant: str, documents: Iterable[StoredDocument]) -> None:
        """Lets the TTL of documents begin anew."""
        with self._database.write(tenant, is_short=True) as connection:
            for document in documents:
                expires_at = self._clock() + (document.ttl_seconds or 0)
                which = is_one(DOCUMENTS, tenant, document.id)
                connection.execute(update(DOCUMENTS).where(which).values(expires_at=expires_at))

    def _keep_earlier(self, tenant: str, read: Iterable[tuple[str, int]]) -> None:
        """Lets replaced texts that were just read by their version live on."""
        with self._database.write(tenant, is_short=True) as connection:
            for document_id, version in read:
                expires_at = self._clock() + self.version_seconds
                connection.execute(last_used_version(tenant, document_id, version, expires_at))

    def _index(self, connection: Connection, tenant: str) -> TextIndex | None:
        """The texts of a tenant, with all changes that any process has made; None: it has stored nothing."""
        with self._search_lock:
            counted = connection.execute(select(TENANTS).where(TENANTS.c.tenant == tenant)).one_or_none()
            if counted is None:
                return None
            searched = self._searched.get(tenant)
            if searched is None or searched.change < counted.forgotten_change:
                searched = self._searched[tenant] = _SearchedTexts(TextIndex(), 0)
            if searched.change < counted.last_change:
                values = {"tenant": tenant, "now": self._clock(), "change": searched.change}
                for name in connection.execute(DELETED_SINCE, values).scalars():
                    searched.index.remove(name)
                for row in connection.execute(WHOLE_CHANGED, values):
                    with _tolerated("it is not found in prompts"):
                        searched.index.add(row.id, text_of(row))
                searched.change = counted.last_change
            return searched.index


def _place(connection: Connection, tenant: str, after: str) -> int:
    """The number in the order of creation that an `after` names."""
    digits = after[1:]
    if after.startswith("~") and digits.isascii() and digits.isdigit() and len(digits) <= 18:
        return int(digits)
    for table in (DOCUMENTS, DELETED) if _is_storable(after) else ():
        number = connection.execute(select(table.c.number).where(is_one(table, tenant, after))).scalar_one_or_none()
        if number is not None:
            return int(number)
    raise UnknownDocument(
        f"after={after!r:.80} is no document of this list; use the last_id or next_after of the reply before, or "
        "start again without it"
    )


def _is_storable(text: str) -> bool:
    """Whether a database can hold this text: PostgreSQL refuses NUL, and no encoding has half characters."""
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


@contextmanager
def _tolerated(what: str) -> Iterator[None]:
    """Logs what failed in the database where a request can be answered nevertheless."""
    try:
        yield
    except (DocumentStoreUnavailable, DocumentDamaged) as error:
        logger.warning("%s: %s", what, error)


def _unknown(document_id: str) -> UnknownDocument:
    return UnknownDocument(
        f"there is no document {document_id!r:.300}; it may be deleted or have expired: store it again"
    )


def _check_match(document_id: str, version: int | None, match: Match | None) -> None:
    if match is not None and not match.fits(version):
        stored = "is not stored" if version is None else f"has version {version}"
        raise DocumentChanged(f"the document {document_id!r} {stored}, which If-Match does not name; read it again")


def _new_id() -> str:
    return f"doc-{secrets.token_hex(12)}"
