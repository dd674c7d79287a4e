"""Stored documents, and the two places where they are kept: in memory, or in a folder that several servers share."""

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
    """One document with what is known about it."""

    id: str
    number: int
    """Grows with the time of creation; a replacement keeps it."""
    version: int
    """Counts what was stored under this id, from 1."""
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
    """Empty where only the heads of documents are listed."""

    @property
    def expires_at(self) -> float | None:
        """When its time is over; None: never."""
        return None if self.ttl_seconds is None else self.ttl_started_at + self.ttl_seconds

    def has_expired(self, now: float) -> bool:
        """Whether its time is over."""
        return self.expires_at is not None and self.expires_at <= now


class Place(Protocol):
    """Where documents are kept. What is written is there whole or not at all."""

    def locked(self) -> Any:
        """A context in which nobody else writes."""

    def read(self, document_id: str) -> StoredDocument | None:
        """One document; None: there is none."""

    def write(self, document: StoredDocument) -> None:
        """Adds or replaces one."""

    def remove(self, document_id: str) -> None:
        """Drops one, if it is there."""

    def touch(self, document: StoredDocument, now: float) -> None:
        """Begins its time to live anew."""

    def heads(self) -> list[StoredDocument]:
        """All documents, without their texts."""


class MemoryPlace:
    """Documents of one process."""

    def __init__(self) -> None:
        self._documents: dict[str, StoredDocument] = {}
        self._lock = RLock()

    def locked(self) -> RLock:
        """A context in which no other thread writes."""
        return self._lock

    def read(self, document_id: str) -> StoredDocument | None:
        """One document; None: there is none."""
        return self._documents.get(document_id)

    def write(self, document: StoredDocument) -> None:
        """Adds or replaces one."""
        self._documents[document.id] = document

    def remove(self, document_id: str) -> None:
        """Drops one, if it is there."""
        self._documents.pop(document_id, None)

    def touch(self, document: StoredDocument, now: float) -> None:
        """Begins its time to live anew."""
        if document.id in self._documents:
            self._documents[document.id] = replace(document, ttl_started_at=now)

    def heads(self) -> list[StoredDocument]:
        """All documents, without their texts."""
        return [replace(document, text="") for document in list(self._documents.values())]


class FolderPlace:
    """Documents as files of one folder, for any number of processes on any number of machines.

        9f86d081….kvmosaic.json     first line: all but the text; second line: the text
                                    its name is the SHA-256 of the id, so no id is ever a path
                                    its time of change is the beginning of its time to live
        lock                        held while somebody writes

    A file is written under another name and moved into place, so readers see the old document or the new one.
    """

    def __init__(self, folder: Path) -> None:
        """Takes a folder, which is made if it is not there.

        Raises:
            InvalidConfig: a place that is no folder, or cannot be written to.
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
        """A context in which no other thread and no other process writes; one inside another is welcome."""
        with self._lock, ExitStack() as held:
            if not self._is_locked:  # a second lock of the same file would wait for the first one for ever
                file = held.enter_context((self._folder / "lock").open("rb"))
                fcntl.flock(file, fcntl.LOCK_EX)
                self._is_locked = True
                held.callback(setattr, self, "_is_locked", False)
            yield

    def read(self, document_id: str) -> StoredDocument | None:
        """One document; None: there is none, or its file is damaged."""
        document = _read(self._file_of(document_id), with_text=True)
        return document if document is not None and document.id == document_id else None

    def write(self, document: StoredDocument) -> None:
        """Adds or replaces one."""
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
        """Drops one, if it is there."""
        self._file_of(document_id).unlink(missing_ok=True)

    def touch(self, document: StoredDocument, now: float) -> None:
        """Begins its time to live anew."""
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
