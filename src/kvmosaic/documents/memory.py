"""In-memory documents of one tenant, by id and in order of creation."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from threading import RLock
from typing import Literal

from kvmosaic.documents.stored import StoredDocument
from kvmosaic.documents.text_index import TextIndex
from kvmosaic.errors import UnknownDocument

Order = Literal["asc", "desc"]
MAX_REMEMBERED = 10_000
"""Deleted ids of one tenant whose number and version are remembered."""


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
class MemoryDocuments:
    """Documents by id, and their sorted numbers, so that bisection finds a page of a long list.

        documents   id -> document
        numbers     ascending, the number of each document once; local to the tenant, since lists show them
        line        heap of (time, number): an entry for each document that can expire, at its time or earlier

    A heap entry may be out of date: when its time has come, it is checked, and pushed again or dropped.
    """

    documents: dict[str, StoredDocument] = field(default_factory=dict)
    numbers: list[int] = field(default_factory=list)
    new_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    """Numbers of future documents."""
    ids: dict[int, str] = field(default_factory=dict)
    num_bytes: int = 0
    remembered: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Number and version of recently deleted ids, oldest first."""
    line: list[tuple[float, int]] = field(default_factory=list)
    max_remembered: int = MAX_REMEMBERED
    lock: RLock = field(default_factory=RLock, repr=False)
    index: TextIndex | None = field(default=None, repr=False)
    """The texts by their content, once they were searched."""

    def read_lock(self) -> RLock:
        """A context in which no other thread changes anything; reentrant, as is `write_lock`."""
        return self.lock

    def write_lock(self) -> RLock:
        """See `read_lock`."""
        return self.lock

    def get(self, document_id: str) -> StoredDocument | None:
        """Returns a document; None: there is none."""
        return self.documents.get(document_id)

    def put(self, document: StoredDocument) -> None:
        """Adds a document with a higher number than any before, or replaces the one with its id and number."""
        before = self.documents.get(document.id)
        if before is None:
            assert not self.numbers or self.numbers[-1] < document.number
            self.numbers.append(document.number)
            self.ids[document.number] = document.id
        self.num_bytes += document.num_bytes - (before.num_bytes if before else 0)
        self.documents[document.id] = document
        if self.index is not None:
            self.index.add(document.id, document.content.text)
        self.push(document)

    def remove(self, document: StoredDocument) -> None:
        """Removes a document; remembers its id, number and version for a while."""
        del self.documents[document.id], self.ids[document.number]
        del self.numbers[bisect_left(self.numbers, document.number)]
        self.num_bytes -= document.num_bytes
        if self.index is not None:
            self.index.remove(document.id)
        self.remembered.pop(document.id, None)
        self.remembered[document.id] = (document.number, document.version)
        if len(self.remembered) > self.max_remembered:
            del self.remembered[next(iter(self.remembered))]

    def search(self, text: str) -> list[tuple[int, int, StoredDocument]]:
        """Returns the documents whose texts are part of a text: (start, end, document), in order, without overlap."""
        if self.index is None:
            self.index = TextIndex()
            for document in self.documents.values():
                self.index.add(document.id, document.content.text)
        return [(start, end, self.documents[found]) for start, end, found in self.index.find(text)]

    def hit(self, document: StoredDocument, now: float) -> None:
        """Counts a hit of a document; restarts its TTL if it was created so."""
        document.hit(now)

    def change(self, document: StoredDocument) -> None:
        """Stores a change of the pin or the priority of a document."""
        self.push(document)

    def push(self, document: StoredDocument) -> None:
        """Queues the expiry of a document; call it whenever the expiry may be earlier than before."""
        if document.expires_at is None:
            return
        heappush(self.line, (document.expires_at, document.number))
        if len(self.line) > 2 * len(self.documents) + 64:
            times = ((other.expires_at, other.number) for other in self.documents.values())
            self.line = [(time, number) for time, number in times if time is not None]
            heapify(self.line)

    def take_expired(self, now: float) -> list[StoredDocument]:
        """Removes expired documents and returns them."""
        expired = []
        while self.line and self.line[0][0] <= now:
            _, number = heappop(self.line)
            document = self.documents.get(self.ids.get(number, ""))
            if document is None:
                continue
            if document.has_expired(now):
                self.remove(document)
                expired.append(document)
            else:
                self.push(document)
        return expired

    def alive(self, now: float) -> tuple[MemoryDocuments, list[StoredDocument]]:
        """Removes expired documents; returns all others, which are this object, and the removed ones."""
        return self, self.take_expired(now)

    def next_number(self, listed: MemoryDocuments, now: float) -> int:
        """Returns the number of the next new document."""
        return next(self.new_numbers)

    def next_version(self, document_id: str) -> int:
        """Returns the version of the next text under an id: an ETag of a deleted document must not match a new one."""
        if (document := self.documents.get(document_id)) is not None:
            return document.version + 1
        return self.remembered.get(document_id, (0, 0))[1] + 1

    def part(self, limit: int, after: str | None, order: Order) -> DocumentPage:
        """Returns the next documents of the list, unaffected by creations and deletions since the last page.

        Args:
            limit: maximum number of documents.
            after: the id of the last document seen (it may have been deleted since), or a `next_after`.
            order: by creation.

        Raises:
            UnknownDocument: `after` is not in this list.
        """
        if order == "asc":
            first = 0 if after is None else bisect_right(self.numbers, self._place(after))
            chosen = self.numbers[first : first + limit]
            has_more = first + limit < len(self.numbers)
        else:
            last = len(self.numbers) if after is None else bisect_left(self.numbers, self._place(after))
            chosen = self.numbers[max(0, last - limit) : last][::-1]
            has_more = last > limit
        return DocumentPage(tuple(self.documents[self.ids[number]] for number in chosen), has_more)

    def check_invariants(self) -> None:
        """Checks ids, numbers and sizes against each other (for tests)."""
        assert self.numbers == sorted(document.number for document in self.documents.values())
        assert self.ids == {document.number: document.id for document in self.documents.values()}
        assert all(document_id == document.id for document_id, document in self.documents.items())
        assert self.num_bytes == sum(document.num_bytes for document in self.documents.values())
        lined = {number: time for time, number in sorted(self.line, reverse=True)}
        for document in self.documents.values():
            assert document.expires_at is None or lined[document.number] <= document.expires_at

    def _place(self, after: str) -> int:
        digits = after[1:]
        if after.startswith("~") and digits.isascii() and digits.isdigit() and len(digits) <= 18:
            return int(digits)
        if (document := self.documents.get(after)) is not None:
            return document.number
        if after in self.remembered:
            return self.remembered[after][0]
        raise UnknownDocument(
            f"after={after!r:.80} is no document of this list; use the last_id or next_after of the reply before, or "
            "start again without it"
        )
