"""Document backends: where the documents of one tenant are stored."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvmosaic.documents.memory import MemoryDocuments
from kvmosaic.documents.stored import StoredDocument


class DocumentBackend(Protocol):
    """Storage of one tenant's documents. Every change is atomic, and is made while `write_lock` is held."""

    def read_lock(self) -> AbstractContextManager[Any]:
        """A context in which documents may be read; reentrant, as is `write_lock`."""

    def write_lock(self) -> AbstractContextManager[Any]:
        """A context with the exclusive right to write."""

    def get(self, document_id: str) -> StoredDocument | None:
        """Returns a document; None: there is none."""

    def put(self, document: StoredDocument) -> None:
        """Adds or replaces a document."""

    def remove(self, document: StoredDocument) -> None:
        """Removes a document."""

    def hit(self, document: StoredDocument, now: float) -> None:
        """Counts a hit of a document; restarts its TTL if it was created so."""

    def change(self, document: StoredDocument) -> None:
        """Stores a change of the pin or the priority of a document."""

    def alive(self, now: float) -> tuple[MemoryDocuments, list[StoredDocument]]:
        """Removes expired documents; returns all others, perhaps without their texts, and the removed ones."""

    def next_number(self, listed: MemoryDocuments, now: float) -> int:
        """Returns the number of the next new document, higher than those of all `listed` ones."""

    def next_version(self, document_id: str) -> int:
        """Returns the version of the next text under an id."""
