"""Rows of stored documents: the statements that read them, and the documents that they are."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from zlib import crc32

from sqlalchemy import ColumnElement, Row, Select, Table, and_, bindparam, or_, select

from kvmosaic.documents.database import DELETED, DOCUMENTS, TEXTS
from kvmosaic.documents.stored import StoredDocument, StoredText, TextHead, label_of
from kvmosaic.errors import DocumentDamaged

AnyRow = Row[Any]
_OF_DOCUMENT = and_(
    TEXTS.c.tenant == DOCUMENTS.c.tenant, TEXTS.c.id == DOCUMENTS.c.id, TEXTS.c.number == DOCUMENTS.c.text_number
)
_IS_ALIVE = or_(DOCUMENTS.c.expires_at.is_(None), DOCUMENTS.c.expires_at > bindparam("now"))

HEADS: Select[Any] = (
    select(*DOCUMENTS.columns, TEXTS.c.title)
    .join(TEXTS, _OF_DOCUMENT)
    .where(DOCUMENTS.c.tenant == bindparam("tenant"), _IS_ALIVE)
)
"""The documents of a `tenant` that have not expired `now`, with their titles and without their texts."""
WHOLE = HEADS.add_columns(TEXTS.c.text, TEXTS.c.checksum)
"""The same with their texts."""
HEADS_BY_ID = HEADS.where(DOCUMENTS.c.id.in_(bindparam("ids", expanding=True)))
WHOLE_BY_ID = WHOLE.where(DOCUMENTS.c.id.in_(bindparam("ids", expanding=True)))
"""Those of them with these `ids`."""
WHOLE_CHANGED = WHOLE.where(DOCUMENTS.c.change > bindparam("change"))
"""Those of them that were stored or changed since a `change`."""
EXPIRED: Select[Any] = (
    select(*DOCUMENTS.columns)
    .where(DOCUMENTS.c.tenant == bindparam("tenant"), DOCUMENTS.c.expires_at <= bindparam("now"))
    .order_by(DOCUMENTS.c.number)
)
DELETED_BY_ID: Select[Any] = select(DELETED).where(
    DELETED.c.tenant == bindparam("tenant"), DELETED.c.id.in_(bindparam("ids", expanding=True))
)
DELETED_SINCE: Select[Any] = select(DELETED.c.id).where(
    DELETED.c.tenant == bindparam("tenant"), DELETED.c.change > bindparam("change")
)
EARLIER_TEXTS: Select[Any] = (
    select(TEXTS.c.number, TEXTS.c.version, TEXTS.c.title, TEXTS.c.num_bytes)
    .where(
        TEXTS.c.tenant == bindparam("tenant"),
        TEXTS.c.id == bindparam("id"),
        TEXTS.c.expires_at > bindparam("now"),
    )
    .order_by(TEXTS.c.number.desc())
)
"""The replaced texts of a document that can still be read, the newest first, without the texts themselves."""
TEXT_OF_VERSION: Select[Any] = (
    select(TEXTS)
    .where(
        TEXTS.c.tenant == bindparam("tenant"), TEXTS.c.id == bindparam("id"), TEXTS.c.version <= bindparam("version")
    )
    .order_by(TEXTS.c.version.desc())
    .limit(1)
)
"""The text that a document had in a version: a version that changed no text has that of the version before."""


def is_one(table: Table, tenant: str, document_id: str) -> ColumnElement[bool]:
    """The rows of one document."""
    return and_(table.c.tenant == tenant, table.c.id == document_id)


def content_of(row: AnyRow, *, has_label: bool) -> StoredText:
    """The text of a row of `WHOLE`, or the head of a row of `HEADS`."""
    label = label_of(row.id, row.text_number) if has_label else ""
    if "text" in row._fields:
        return StoredText(text_of(row), row.title, row.id, row.priority, label=label)
    return TextHead("", row.title, row.id, row.priority, label=label)


def checksum_of(title: str | None, text: bytes) -> int:
    """The checksum of a text and its title."""
    return crc32(text, crc32((title or "").encode()))


def text_of(row: AnyRow) -> str:
    """The text of a row of `WHOLE` or `TEXTS`.

    Raises:
        DocumentDamaged: it is not what was stored.
    """
    with suppress(UnicodeDecodeError):
        if row.checksum is None or row.checksum == checksum_of(row.title, row.text):
            return str(row.text.decode())
    raise DocumentDamaged(f"the stored document {row.id!r:.300} is damaged; store its text again, or delete it")


def document_of(row: AnyRow, content: StoredText, *, drift: float = 0.0) -> StoredDocument:
    """The document of a row.

    Args:
        row: of `HEADS` or `WHOLE`.
        content: its text or head.
        drift: seconds by which the system's clock is ahead of that of `expires_at`.
    """
    return StoredDocument(
        id=row.id,
        number=row.number,
        version=row.version,
        content=content,
        metadata=row._mapping["metadata"],
        created_at=row.created_at,
        updated_at=row.updated_at,
        ttl_seconds=row.ttl_seconds,
        refresh_ttl_on_hit=row.refresh_ttl_on_hit,
        pinned=row.pinned,
        expires_at=None if row.expires_at is None else row.expires_at + drift,
        num_characters=row.num_characters,
        num_bytes=row.num_bytes,
        change=row.change,
        hits=row.hits,
        last_used_at=row.last_used_at,
    )
