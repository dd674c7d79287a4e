"""Drafts of a disk tier: entries being written, and stale ones of dead writers."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from kvmosaic.tiers.disk.files import FileSystem, draft_name, host_of, this_host
from kvmosaic.tiers.tier import Deadline

STALE_SECONDS = 600
"""A draft of an unknown or another host is stale after so many seconds without a write."""
_PIECE = 2**24
"""Bytes written between two deadline checks."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_OPEN = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


@dataclass(frozen=True, slots=True)
class DraftFile:
    """A complete, open file, locked until it is renamed to its entry or removed."""

    name: str
    fd: int


class DraftFiles:
    """Writer of drafts, and garbage collector of stale ones of dead writers.

        .<key hex>.<host>.<random>.partial      locked (flock) by its writer, for as long as that lives

    A lock ends with its process, so on one host a draft that can be locked is stale. On a network file system a lock
    may, depending on settings, be visible only on its host: the name tells which one that is, and an unlocked draft of
    another host is stale after `STALE_SECONDS` without a write. Where files cannot be locked at all, that applies to
    all of them. A locked draft is never stale.
    """

    def __init__(self, files: FileSystem, *, durable: bool) -> None:
        self._files = files
        self._durable = durable
        self._host = this_host()
        self._own: set[str] = set()
        """Names of drafts in progress in this process."""

    def write(self, subject: str, entry: memoryview, moment: int, folder: int, deadline: Deadline) -> DraftFile | None:
        """Writes a draft of an entry; None if the deadline passed.

        Raises:
            OSError: it cannot be written; the file is removed.
        """
        name = draft_name(subject, self._host)
        self._own.add(name)
        fd = None
        try:
            fd = self._files.open(name, _CREATE, folder=folder)
            draft = DraftFile(name, fd)
            if self._claim(fd) and self._fill(fd, entry, moment, deadline):
                return draft
        except BaseException:
            self._end(name, fd, folder)
            raise
        self._end(name, fd, folder)
        return None

    def place(self, draft: DraftFile, name: str, folder: int) -> None:
        """Renames a draft to its entry, atomically.

        Raises:
            OSError: it is still a draft; `discard` it.
        """
        self._files.rename(draft.name, name, folder=folder, new_folder=folder)
        self._let_go(draft.name, draft.fd)

    def discard(self, draft: DraftFile, folder: int | None) -> None:
        """Removes a draft, if possible; None: its folder cannot be opened."""
        self._end(draft.name, draft.fd, folder)

    def is_own(self, name: str) -> bool:
        """Whether a draft is in progress in this process."""
        return name in self._own

    def collect(self, name: str, age_seconds: float, folder: int) -> bool:
        """Removes a stale draft; returns whether it is gone."""
        is_old = age_seconds > STALE_SECONDS
        if not is_old and (not self._host or host_of(name) != self._host):
            return False
        try:
            fd = self._files.open(name, _OPEN, folder=folder)
        except FileNotFoundError:
            return True
        except OSError:  # no permission to open it, so its lock cannot be checked
            return is_old and self._remove(name, folder)
        try:
            is_left = is_old
            with contextlib.suppress(OSError):
                is_left = self._files.lock(fd)
            return is_left and self._remove(name, folder)  # before the lock ends: a writer that comes late sees it
        finally:
            self._close(fd)

    def _claim(self, fd: int) -> bool:
        """Locks a new draft; False if another process just removed it as stale."""
        try:
            if not self._files.lock(fd):
                return False
        except OSError:  # no locks on this file system
            return True
        return self._files.facts(fd).st_nlink > 0

    def _fill(self, fd: int, entry: memoryview, moment: int, deadline: Deadline) -> bool:
        start = 0
        while start < entry.nbytes:
            if deadline.has_passed:
                return False
            start += self._files.write(fd, entry[start : start + _PIECE])
        self._files.set_time(fd, moment)
        if self._durable:
            self._files.sync(fd)
        self._files.flush(fd)
        return True

    def _end(self, name: str, fd: int | None, folder: int | None) -> None:
        if folder is not None:
            self._remove(name, folder)
        self._let_go(name, fd)

    def _let_go(self, name: str, fd: int | None) -> None:
        self._own.discard(name)
        if fd is not None:
            self._close(fd)

    def _remove(self, name: str, folder: int) -> bool:
        try:
            self._files.remove(name, folder=folder)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def _close(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._files.close(fd)
