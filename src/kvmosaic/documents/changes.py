"""Changes of the stored documents of one tenant, made in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, insert, select, update

from kvmosaic.documents.database import DELETED, DOCUMENTS, TENANTS, TEXTS
from kvmosaic.documents.rows import DELETED_BY_ID, EXPIRED, WHOLE_BY_ID, AnyRow, checksum_of, content_of, is_one
from kvmosaic.documents.stored import DocumentDraft, StoredText, StoreLimits, label_of
from kvmosaic.errors import DocumentDamaged, DocumentStoreFull, DocumentTooLarge

MAX_REMEMBERED = 10_000
"""Deleted ids of one tenant whose number and version are remembered."""
MAX_EARLIER_TEXTS = 16
"""Maximum replaced texts of one document that stay readable."""


class TenantChanges:
    """Changes on the only connection that writes; `finish` writes the sums and what is still queued.

    Every change has a number, higher than those before: other processes read what has a higher one than they know.
    """

    def __init__(
        self,
        connection: Connection,
        tenant: str,
        *,
        now: float,
        wall: float,
        limits: StoreLimits,
        version_seconds: float,
    ) -> None:
        """Begins.

        Args:
            connection: of a transaction that writes.
            tenant: whose documents are changed.
            now: the time of the clock of `expires_at`.
            wall: unix seconds.
            limits: how much the tenant may store.
            version_seconds: how long a replaced text stays readable; 0: it is gone at once.
        """
        self._connection = connection
        self._tenant = tenant
        self._now = now
        self._wall = wall
        self._limits = limits
        self._version_seconds = version_seconds
        counted = connection.execute(select(TENANTS).where(TENANTS.c.tenant == tenant)).one()
        self._sums: dict[str, int] = dict(counted._mapping)
        self._known: dict[str, AnyRow] = {}
        self._deleted: dict[str, AnyRow] = {}
        self._added: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
        """By id: the rows of a new document and its text, which are inserted together with others."""
        self.retired: list[str] = []
        """Labels of texts that are no longer current once the transaction has ended."""
        self.num_expired = self._remove_expired()
        """Documents that had expired, and were removed at the beginning."""

    def read(self, ids: Sequence[str]) -> None:
        """Reads what is stored under these ids, so that `put` finds it; forgets what it has read before."""
        self._insert_added()
        values = {"tenant": self._tenant, "now": self._now, "ids": list(ids)}
        self._known, self._deleted = (
            {row.id: row for row in self._connection.execute(rows, values)} for rows in (WHOLE_BY_ID, DELETED_BY_ID)
        )

    def version(self, document_id: str) -> int | None:
        """The version under an id that was read; None: there is none."""
        row = self._known.get(document_id)
        return None if row is None else row.version

    def put(self, document_id: str, draft: DocumentDraft) -> None:
        """Creates or replaces a document whose id was read, at most once after each `read`.

        Raises:
            InvalidDocument, DocumentTooLarge, DocumentStoreFull: nothing was written.
        """
        before = self._known.get(document_id)
        priority = before.priority if draft.priority is None and before is not None else draft.priority
        content = StoredText(draft.text, draft.title, document_id, priority)
        num_bytes = content.count_bytes()
        num_bytes_before = 0 if before is None else before.num_bytes
        self._check_room(content, num_bytes, before)
        change = self._next("last_change")
        is_same = False
        with suppress(DocumentDamaged):
            is_same = before is not None and content_of(before).reads_like(content)
        pinned = bool(draft.pinned) if draft.pinned is not None or before is None else before.pinned
        document = {
            "change": change,
            "text_number": before.text_number if before is not None and is_same else change,
            "metadata": dict(draft.metadata),
            "updated_at": self._wall,
            "ttl_seconds": draft.ttl_seconds,
            "refresh_ttl_on_hit": draft.refresh_ttl_on_hit,
            "expires_at": self.expiry(draft.ttl_seconds, pinned=pinned),
            "pinned": pinned,
            "priority": priority,
            "num_characters": len(content.text),
            "num_bytes": num_bytes,
        }
        encoded = content.text.encode()
        checked = {"text": encoded, "checksum": checksum_of(content.title, encoded)}
        text = {"num_bytes": num_bytes, "title": content.title, "expires_at": None, **checked}
        self._sums["num_bytes"] += num_bytes - num_bytes_before
        if before is None:
            self._add(document_id, document, text)
        else:
            self._replace(before, document, None if is_same else text)
        self._make_room()

    def remove(self, row: AnyRow) -> None:
        """Removes a document with all its texts; remembers its id, place and version for a while."""
        change = self._next("last_change")
        self._connection.execute(delete(DOCUMENTS).where(is_one(DOCUMENTS, self._tenant, row.id)))
        current = and_(is_one(TEXTS, self._tenant, row.id), TEXTS.c.number == row.text_number)
        self._connection.execute(delete(TEXTS).where(current))
        self._retire(row.id, row.text_number)
        self.forget_texts(is_one(TEXTS, self._tenant, row.id))
        self._sums["num_documents"] -= 1
        self._sums["num_bytes"] -= row.num_bytes
        remembered = {"id": row.id, "number": row.number, "version": row.version, "change": change}
        self._connection.execute(insert(DELETED).values(tenant=self._tenant, **remembered))
        if change % MAX_REMEMBERED == 0:
            self._forget_deleted()

    def _remove_expired(self) -> int:
        """Removes expired documents and replaced texts; returns the number of documents."""
        rows = self._connection.execute(EXPIRED, {"tenant": self._tenant, "now": self._now}).all()
        for row in rows:
            self.remove(row)
        self.forget_texts(and_(TEXTS.c.tenant == self._tenant, TEXTS.c.expires_at <= self._now))
        return len(rows)

    def update(self, document_id: str, **values: Any) -> None:
        """Changes columns of a document."""
        changed = update(DOCUMENTS).where(is_one(DOCUMENTS, self._tenant, document_id))
        self._connection.execute(changed.values(change=self._next("last_change"), **values))

    def expiry(self, ttl_seconds: int | None, *, pinned: bool) -> float | None:
        """When a document expires that begins to live now; None: never."""
        return None if ttl_seconds is None or pinned else self._now + ttl_seconds

    def forget_texts(self, which: ColumnElement[bool]) -> None:
        """Removes those of these texts that are replaced."""
        gone = delete(TEXTS).where(which, TEXTS.c.expires_at.is_not(None))
        for row in self._connection.execute(gone.returning(TEXTS.c.id, TEXTS.c.number, TEXTS.c.num_bytes)).all():
            self._retire(row.id, row.number)
            self._sums["num_earlier_bytes"] -= row.num_bytes

    def finish(self) -> None:
        """Writes what is still queued, and the sums."""
        self._insert_added()
        self._connection.execute(update(TENANTS).where(TENANTS.c.tenant == self._tenant).values(self._sums))

    def _add(self, document_id: str, document: dict[str, Any], text: dict[str, Any]) -> None:
        deleted = self._deleted.get(document_id)
        version = 1
        if deleted is not None:  # an ETag of the deleted document must not match this one
            version = deleted.version + 1
            self._connection.execute(delete(DELETED).where(is_one(DELETED, self._tenant, document_id)))
        self._sums["num_documents"] += 1
        key = {"tenant": self._tenant, "id": document_id, "version": version}
        created = {"number": self._next("last_number"), "created_at": self._wall, "hits": 0, "last_used_at": None}
        self._added[document_id] = {**key, **document, **created}, {**key, **text, "number": document["text_number"]}

    def _replace(self, before: AnyRow, document: dict[str, Any], text: dict[str, Any] | None) -> None:
        """Writes a new version; `text`: None if it has the same text."""
        document["version"] = before.version + 1
        self._connection.execute(update(DOCUMENTS).where(is_one(DOCUMENTS, self._tenant, before.id)).values(document))
        if text is None:
            return
        replaced = and_(is_one(TEXTS, self._tenant, before.id), TEXTS.c.number == before.text_number)
        if self._version_seconds:
            expires_at = self._now + self._version_seconds
            self._connection.execute(update(TEXTS).where(replaced).values(expires_at=expires_at))
            self._sums["num_earlier_bytes"] += before.num_bytes
            self._limit_texts(before.id)
        else:
            self._connection.execute(delete(TEXTS).where(replaced))
        self._retire(before.id, before.text_number)
        key = {"tenant": self._tenant, "id": before.id, "version": document["version"], "number": document["change"]}
        self._connection.execute(insert(TEXTS).values({**key, **text}))

    def _insert_added(self) -> None:
        for table, rows in zip((DOCUMENTS, TEXTS), zip(*self._added.values(), strict=True), strict=False):
            self._connection.execute(insert(table), rows)
        self._added.clear()

    def _limit_texts(self, document_id: str) -> None:
        """Removes the oldest of too many replaced texts of one document."""
        which = and_(is_one(TEXTS, self._tenant, document_id), TEXTS.c.expires_at.is_not(None))
        newest_first = select(TEXTS.c.number).where(which).order_by(TEXTS.c.number.desc())
        last = self._connection.execute(newest_first.offset(MAX_EARLIER_TEXTS).limit(1)).scalar_one_or_none()
        if last is not None:
            self.forget_texts(and_(which, TEXTS.c.number <= last))

    def _make_room(self) -> None:
        """Removes replaced texts for which there is no room, the oldest first."""
        too_many = self._sums["num_bytes"] + self._sums["num_earlier_bytes"] - self._limits.max_bytes
        if too_many <= 0:
            return
        which = and_(TEXTS.c.tenant == self._tenant, TEXTS.c.expires_at.is_not(None))
        oldest_first = select(TEXTS.c.number, TEXTS.c.num_bytes).where(which).order_by(TEXTS.c.number)
        last = 0
        for row in self._connection.execute(oldest_first):
            too_many, last = too_many - row.num_bytes, row.number
            if too_many <= 0:
                break
        self.forget_texts(and_(which, TEXTS.c.number <= last))

    def _forget_deleted(self) -> None:
        """Forgets the oldest of too many deleted ids."""
        kept = select(DELETED.c.change).where(DELETED.c.tenant == self._tenant).order_by(DELETED.c.change.desc())
        oldest = self._connection.execute(kept.offset(MAX_REMEMBERED).limit(1)).scalar_one_or_none()
        if oldest is not None:
            self._connection.execute(
                delete(DELETED).where(DELETED.c.tenant == self._tenant, DELETED.c.change <= oldest)
            )
            self._sums["forgotten_change"] = oldest

    def _check_room(self, content: StoredText, num_bytes: int, before: AnyRow | None) -> None:
        limits = self._limits
        if len(content.text) > limits.max_characters:
            raise DocumentTooLarge(
                f"the text has {len(content.text)} characters; at most {limits.max_characters} are allowed: split it"
            )
        if num_bytes > limits.max_bytes:
            raise DocumentTooLarge(
                f"title and text have {num_bytes} bytes; a tenant may store {limits.max_bytes} in all: split it"
            )
        num_documents = self._sums["num_documents"]
        if before is None and num_documents >= limits.max_documents:
            raise DocumentStoreFull(
                f"{num_documents} documents are stored, which is the limit; delete some, let them expire, or start the "
                "server with a higher --max-documents"
            )
        total = self._sums["num_bytes"] + num_bytes - (before.num_bytes if before is not None else 0)
        if total > limits.max_bytes:
            raise DocumentStoreFull(
                f"{num_bytes} bytes more make {total} bytes of stored text, the limit is {limits.max_bytes}; delete "
                "some documents, let them expire, or start the server with a higher --max-documents-bytes"
            )

    def _next(self, name: str) -> int:
        self._sums[name] += 1
        return self._sums[name]

    def _retire(self, document_id: str, text_number: int) -> None:
        self.retired.append(label_of(document_id, text_number))


def last_used_version(tenant: str, document_id: str, version: int, expires_at: float) -> Any:
    """The statement that lets a replaced text live on, since it was read by its version."""
    first = select(func.max(TEXTS.c.version)).where(is_one(TEXTS, tenant, document_id), TEXTS.c.version <= version)
    read = and_(is_one(TEXTS, tenant, document_id), TEXTS.c.version == first.scalar_subquery())
    return update(TEXTS).where(read, TEXTS.c.expires_at.is_not(None)).values(expires_at=expires_at)
