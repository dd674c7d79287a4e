"""Documents in a folder, which any number of processes on any number of machines share."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import RLock
from typing import Any

from kvmosaic.documents.memory import MemoryDocuments
from kvmosaic.documents.stored import StoredDocument, StoredText, TextHead
from kvmosaic.errors import InvalidConfig, InvalidDocument

_MAX_HEAD_BYTES = 2**18
_MAX_FILE_BYTES = 2**28
_SUFFIX = ".kvmosaic.json"
_FIELDS = (
    *("id", "number", "version", "created_at", "updated_at", "ttl_seconds", "refresh_ttl_on_hit", "num_bytes"),
    "metadata",
)
"""Fields of a stored document that its file has under the same name."""


class FolderDocuments:
    """Documents as files of one folder; a `DocumentBackend`.

        9f86d081….kvmosaic.json     first line: all but the text; second line: the text
                                    its name is the SHA-256 of the id, so no id is ever a path
                                    its modification time is the start of its TTL
        lock                        held during a write

    A file is written under another name and renamed, so readers see the old document or the new one. Hits are counted
    by each process for itself; labels are not kept, since chunks are in no cache that the processes share.
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
        self._hits: dict[str, tuple[int, float]] = {}
        """By id: number of hits, and the time of the last one."""

    def read_lock(self) -> AbstractContextManager[None]:
        """Nothing: files are replaced whole."""
        return nullcontext()

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """A context in which no other thread and no other process writes; reentrant."""
        with self._lock, ExitStack() as held:
            if not self._is_locked:  # a second lock of the same file would deadlock
                file = held.enter_context((self._folder / "lock").open("rb"))
                fcntl.flock(file, fcntl.LOCK_EX)
                self._is_locked = True
                held.callback(setattr, self, "_is_locked", False)
            yield

    def get(self, document_id: str) -> StoredDocument | None:
        """Returns a document; None: there is none, or its file is damaged."""
        return self._read(self._file_of(document_id), with_text=True)

    def put(self, document: StoredDocument) -> None:
        """Adds or replaces a document."""
        fields = {name: getattr(document, name) for name in _FIELDS}
        fields |= {"metadata": dict(document.metadata), "title": document.content.title}
        fields |= {"characters": document.num_characters, **_cache_settings(document)}
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(f"{json.dumps(fields)}\n{json.dumps(document.content.text)}\n")
            os.utime(name, (document.ttl_started_at, document.ttl_started_at))
            Path(name).replace(self._file_of(document.id))
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise

    def remove(self, document: StoredDocument) -> None:
        """Removes a document, if it exists."""
        self._file_of(document.id).unlink(missing_ok=True)
        self._hits.pop(document.id, None)

    def hit(self, document: StoredDocument, now: float) -> None:
        """Counts a hit of a document; restarts its TTL if it was created so."""
        self._hits[document.id] = (document.hits + 1, now)
        if document.refresh_ttl_on_hit:
            with suppress(OSError):
                os.utime(self._file_of(document.id), (now, now))

    def change(self, document: StoredDocument) -> None:
        """Stores a change of the pin or the priority of a document."""
        self.put(document)

    def alive(self, now: float) -> tuple[MemoryDocuments, list[StoredDocument]]:
        """Removes expired documents; returns the others without their texts, and the removed ones."""
        listed = self._listed()
        expired = listed.take_expired(now)
        for head in expired:
            with self.write_lock():
                document = self.get(head.id)
                if document is not None and document.has_expired(now):  # not replaced meanwhile
                    self.remove(document)
        return listed, expired

    def next_number(self, listed: MemoryDocuments, now: float) -> int:
        """Returns the number of the next new document: microseconds, so that processes need no common counter."""
        return max(int(now * 1e6), listed.numbers[-1] + 1 if listed.numbers else 1)

    def next_version(self, document_id: str) -> int:
        """Returns the version of the next text under an id; it begins again after a deletion."""
        document = self._read(self._file_of(document_id), with_text=False)
        return 1 if document is None else document.version + 1

    def _listed(self) -> MemoryDocuments:
        """All documents, without their texts."""
        files = [self._folder / entry.name for entry in os.scandir(self._folder) if entry.name.endswith(_SUFFIX)]
        heads = [document for file in files if (document := self._read(file, with_text=False)) is not None]
        listed = MemoryDocuments()
        for head in sorted(heads, key=lambda head: (head.number, head.id)):
            if listed.numbers:  # files of two folders in one may have equal numbers
                head.number = max(head.number, listed.numbers[-1] + 1)
            listed.put(head)
        return listed

    def _file_of(self, document_id: str) -> Path:
        return self._folder / (hashlib.sha256(document_id.encode()).hexdigest() + _SUFFIX)

    def _read(self, path: Path, *, with_text: bool) -> StoredDocument | None:
        try:
            with path.open(encoding="utf-8") as file:
                changed = os.fstat(file.fileno()).st_mtime
                fields: dict[str, Any] = json.loads(file.readline(_MAX_HEAD_BYTES))
                title, priority = fields.pop("title"), fields.pop("priority", None)
                if with_text:
                    content = StoredText(json.loads(file.readline(_MAX_FILE_BYTES)), title, fields["id"], priority)
                else:
                    content = TextHead("", title, fields["id"], priority)
            hits, last_used_at = self._hits.get(content.id or "", (0, None))
            document = StoredDocument(
                content=content,
                num_characters=fields.pop("characters"),
                pinned=fields.pop("pinned", False),
                ttl_started_at=changed,
                hits=hits,
                last_used_at=last_used_at,
                **fields,
            )
            return document if self._file_of(document.id) == path else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, InvalidDocument):
            return None


def _cache_settings(document: StoredDocument) -> dict[str, Any]:
    """How its chunks stay in a cache, if that was set."""
    pinned = {"pinned": True} if document.pinned else {}
    priority = document.content.priority
    return pinned if priority is None else {**pinned, "priority": priority}
