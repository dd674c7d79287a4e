"""Document storage, in memory or in a folder that several servers share."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any, Protocol

from kvmosaic.errors import InvalidConfig

_MAX_HEAD_BYTES = 2**18
_MAX_FILE_BYTES = 2**28
_SUFFIX = ".kvmosaic.json"


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """One stored document with its metadata."""

    id: str
    number: int
    """Grows with the time of creation; unchanged by a replacement."""
    version: int
    """Number of versions stored under this id, from 1."""
    title: str | None
    created_at: float
    """Unix seconds, as are the other times."""
    updated_at: float
    ttl_seconds: int | None
    refresh_ttl_on_hit: bool
    ttl_started_at: float
    characters: int
    num_bytes: int
    """Bytes of title and text in UTF-8."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    text: str = ""
    """Empty in listings."""

    @property
    def expires_at(self) -> float | None:
        """When it expires; None: never."""
        return None if self.ttl_seconds is None else self.ttl_started_at + self.ttl_seconds

    def has_expired(self, now: float) -> bool:
        """Whether it has expired."""
        return self.expires_at is not None and self.expires_at <= now


class DocumentBackend(Protocol):
    """Storage backend of documents. Writes are atomic."""

    def locked(self) -> Any:
        """A context with the exclusive right to write."""

    def read(self, document_id: str) -> StoredDocument | None:
        """Returns a document; None: there is none."""

    def write(self, document: StoredDocument) -> None:
        """Adds or replaces a document."""

    def remove(self, document_id: str) -> None:
        """Removes a document, if it exists."""

    def touch(self, document: StoredDocument, now: float) -> None:
        """Restarts the TTL of a document."""

    def heads(self) -> list[StoredDocument]:
        """All documents, without their texts."""


class MemoryPlace:
    """In-memory storage of one process."""

    def __init__(self) -> None:
        self._documents: dict[str, StoredDocument] = {}
        self._lock = RLock()

    def locked(self) -> RLock:
        """A context in which no other thread writes."""
        return self._lock

    def read(self, document_id: str) -> StoredDocument | None:
        """Returns a document; None: there is none."""
        return self._documents.get(document_id)

    def write(self, document: StoredDocument) -> None:
        """Adds or replaces a document."""
        self._documents[document.id] = document

    def remove(self, document_id: str) -> None:
        """Removes a document, if it exists."""
        self._documents.pop(document_id, None)

    def touch(self, document: StoredDocument, now: float) -> None:
        """Restarts the TTL of a document."""
        if document.id in self._documents:
            self._documents[document.id] = replace(document, ttl_started_at=now)

    def heads(self) -> list[StoredDocument]:
        """All documents, without their texts."""
        return [replace(document, text="") for document in list(self._documents.values())]


class FolderPlace:
    """Documents as files of one folder, for any number of processes on any number of machines.

        9f86d081….kvmosaic.json     first line: all but the text; second line: the text
                                    its name is the SHA-256 of the id, so no id is ever a path
                                    its modification time is the start of its TTL
        lock                        held during a write

    A file is written under another name and renamed, so readers see the old document or the new one.
    """

    def __init__(self, folder: Path) -> None:
        """Opens a folder, which is created if it does not exist.

        Raises:
            InvalidConfig: not a folder, or not writable.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "lock").touch()
        except OSError as error:
            raise InvalidConfig(
                f"KVMOSAIC_DOCUMENTS_DIR is {str(folder)!r:.200}, which cannot be written to ({error.strerror}); "
                "give a folder of which this user is the owner"
            ) from None
        self._folder = folder
        self._lock = RLock()
        self._is_locked = False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context in which no other thread and no other process writes; reentrant."""
        with self._lock, ExitStack() as held:
            if not self._is_locked:  # a second lock of the same file would deadlock
                file = held.enter_context((self._folder / "lock").open("rb"))
                fcntl.flock(file, fcntl.LOCK_EX)
                self._is_locked = True
                held.callback(setattr, self, "_is_locked", False)
            yield

    def read(self, document_id: str) -> StoredDocument | None:
        """Returns a document; None: there is none, or its file is damaged."""
        document = _read(self._file_of(document_id), with_text=True)
        return document if document is not None and document.id == document_id else None

    def write(self, document: StoredDocument) -> None:
        """Adds or replaces a document."""
        fields = {name: value for name, value in asdict(document).items() if name not in ("text", "ttl_started_at")}
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"{json.dumps(fields)}\n{json.dumps(document.text)}\n")
            os.utime(name, (document.ttl_started_at, document.ttl_started_at))
            Path(name).replace(self._file_of(document.id))
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise

    def remove(self, document_id: str) -> None:
        """Removes a document, if it exists."""
        self._file_of(document_id).unlink(missing_ok=True)

    def touch(self, document: StoredDocument, now: float) -> None:
        """Restarts the TTL of a document."""
        with suppress(OSError):
            os.utime(self._file_of(document.id), (now, now))

    def heads(self) -> list[StoredDocument]:
        """All documents, without their texts."""
        files = [self._folder / entry.name for entry in os.scandir(self._folder) if entry.name.endswith(_SUFFIX)]
        return [document for file in files if (document := _read(file, with_text=False)) is not None]

    def _file_of(self, document_id: str) -> Path:
        return self._folder / (hashlib.sha256(document_id.encode()).hexdigest() + _SUFFIX)


def _read(path: Path, *, with_text: bool) -> StoredDocument | None:
    try:
        with path.open(encoding="utf-8") as file:
            changed = os.fstat(file.fileno()).st_mtime
            fields = json.loads(file.readline(_MAX_HEAD_BYTES))
            text = json.loads(file.readline(_MAX_FILE_BYTES)) if with_text else ""
            return StoredDocument(**fields, ttl_started_at=changed, text=text)
    except (OSError, ValueError, TypeError):
        return None
