"""Rows of stored documents and the statements that read them; and the index that finds stored texts in prompts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Row, Select, Table, and_, bindparam, or_, select

from kvmosaic.documents.database import DELETED, DOCUMENTS, TEXTS
from kvmosaic.documents.stored import StoredDocument, StoredText, TextHead, label_of
from kvmosaic.errors import DocumentDamaged
from kvmosaic.prompt.found_documents import MIN_FOUND_CHARACTERS

ANCHOR_CHARACTERS = MIN_FOUND_CHARACTERS
MAX_SAME_ANCHOR = 16
"""Maximum texts with one anchor; a text whose possible anchors are all taken so often is not found."""
_WORDS = 2**64
_MIN_SLOTS = 2**16
_SLOTS_PER_TEXT = 16
_COMPARED_PER_CHARACTER = 16
"""Budget of compared characters for each character of a prompt; the search ends when it is used up."""
_COMPARISON = 256
"""What a comparison costs besides, in characters."""
_WINDOWS = 2**20
"""Windows that are hashed together."""

Hashes = NDArray[np.uint64]


class TextIndex:
    """Texts by an anchor in each; adding and removing one is O(1), a search linear in the length of the prompt.

        stored   "The tower of Fenbury is forty metres high, and older than the town."
                                     |-- anchor: 32 characters --|
        prompt   "... Context: The tower of Fenbury is forty metres high, and older than the town. How high ..."

    Each text has one anchor. The hashes of all windows of 32 characters of a prompt are computed together and looked
    up; where an anchor is found, the digest of the whole text is compared. The texts themselves are not kept.

    One thread at a time adds and removes. Others may search meanwhile: they find each text as it was before or after.

    The hash is a polynomial with a random base for each index, so that no text can be made to collide with others.
    """

    def __init__(self) -> None:
        """Creates an empty index."""
        self._base = secrets.randbits(64) | 1
        self._key = secrets.token_bytes(16)
        self._texts: dict[str, tuple[int, int, int, bytes]] = {}
        """By id: hash of the anchor, its place in the text, and length and digest of the text."""
        self._by_hash: dict[int, list[str]] = {}
        self._is_slot_used = np.zeros(_MIN_SLOTS, dtype=bool)
        """By the highest bits of a hash: whether a text may have that hash. Slots of removed texts stay used."""

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text_id: str, text: str) -> None:
        """Adds a text, or replaces the one with its id; a text shorter than an anchor is not found."""
        self.remove(text_id)
        last = len(text) - ANCHOR_CHARACTERS
        if last < 0:
            return
        places = dict.fromkeys((0, last // 2, last, last // 4, 3 * last // 4))
        anchors = ((self._hash(text[place : place + ANCHOR_CHARACTERS]), place) for place in places)
        best: tuple[int, int, int] | None = None
        for anchor, place in anchors:
            count = len(self._by_hash.get(anchor, ()))
            best = min(best or (count, anchor, place), (count, anchor, place), key=lambda each: each[0])
            if not count:
                break
        assert best is not None
        count, anchor, place = best
        if count >= MAX_SAME_ANCHOR:
            return
        self._texts[text_id] = anchor, place, len(text), self._digest(text)
        self._by_hash.setdefault(anchor, []).append(text_id)
        if len(self._texts) * _SLOTS_PER_TEXT > len(self._is_slot_used):
            self._grow()
        self._is_slot_used[anchor >> _shift(self._is_slot_used)] = True

    def remove(self, text_id: str) -> None:
        """Removes a text, if it is there."""
        if (known := self._texts.pop(text_id, None)) is None:
            return
        ids = self._by_hash[known[0]]
        ids.remove(text_id)
        if not ids:
            del self._by_hash[known[0]]

    def find(self, text: str) -> list[tuple[int, int, str]]:
        """The texts that are part of a text: (start, end, id), in order, without overlap.

        Where several begin at the same place, the longest counts; where they overlap, the first.
        """
        left = _COMPARED_PER_CHARACTER * len(text) + 2**16
        found, end = list[tuple[int, int, str]](), 0
        matches = list[tuple[int, int, str]]()
        for start, end_of_it, digest, text_id in self._candidates(text):
            left -= end_of_it - start + _COMPARISON
            if left < 0:
                break
            if self._digest(text[start:end_of_it]) == digest:
                matches.append((start, end_of_it, text_id))
        for match in sorted(matches, key=lambda match: (match[0], -match[1])):
            if match[0] >= end:
                found.append(match)
                end = match[1]
        return found

    def _candidates(self, text: str) -> Iterator[tuple[int, int, bytes, str]]:
        """Where a text may be whose anchor is in a prompt: its start and end, its digest, and its id."""
        for offset in range(0, len(text), _WINDOWS) if self._texts else ():
            hashes = self._window_hashes(text[offset : offset + _WINDOWS + ANCHOR_CHARACTERS - 1])
            is_slot_used = self._is_slot_used  # another thread may replace it
            (places,) = np.nonzero(is_slot_used[hashes >> np.uint64(_shift(is_slot_used))])
            for index, anchor in zip(places.tolist(), hashes[places].tolist(), strict=True):
                for text_id in tuple(self._by_hash.get(anchor, ())):
                    _, place, length, digest = self._texts.get(text_id, (0, 0, 0, b""))
                    start = offset + index - place
                    if length and start >= 0 and start + length <= len(text):
                        yield start, start + length, digest, text_id

    def _grow(self) -> None:
        is_slot_used = np.zeros(4 * len(self._is_slot_used), dtype=bool)
        hashes = np.fromiter(self._by_hash, dtype=np.uint64, count=len(self._by_hash))
        is_slot_used[hashes >> np.uint64(_shift(is_slot_used))] = True
        self._is_slot_used = is_slot_used

    def _digest(self, text: str) -> bytes:
        return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=self._key).digest()

    def _hash(self, text: str) -> int:
        value = 0
        for character in text:
            value = (value * self._base + ord(character)) % _WORDS
        return value

    def _window_hashes(self, text: str) -> Hashes:
        """`_hash` of every window of the text: windows of 1, 2, 4, ... characters, each made from two shorter ones."""
        hashes: Hashes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.uint64)
        if len(hashes) < ANCHOR_CHARACTERS:
            return hashes[:0]
        width, power = 1, self._base
        while width < ANCHOR_CHARACTERS:
            hashes = hashes[:-width] * np.uint64(power) + hashes[width:]
            width, power = 2 * width, power * power % _WORDS
        return hashes


def _shift(is_slot_used: NDArray[np.bool_]) -> int:
    """How far a hash is shifted to give a slot."""
    return 65 - len(is_slot_used).bit_length()


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


def content_of(row: AnyRow) -> StoredText:
    """The text of a row of `WHOLE`, or the head of a row of `HEADS`."""
    label = label_of(row.id, row.text_number)
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
