"""Drafts of a disk tier: entries being written, and stale ones of dead writers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from kvmosaic.tiers.disk.files import RealFiles, draft_name, host_of, this_host
from kvmosaic.tiers.tier import Deadline

STALE_SECONDS = 600
"""A draft of an unknown or another host is stale after so many seconds without a write."""
_PIECE = 2**24
"""Bytes written between two deadline checks."""
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_OPEN = os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class DraftFiles:
    """Writer of drafts, and garbage collector of stale ones of dead writers.

        .<key hex>.<host>.<random>.partial      locked (flock) by its writer, for as long as that lives

    A lock ends with its process, so on one host a draft that can be locked is stale. On a network file system a lock
    may, depending on settings, be visible only on its host: the name tells which one that is, and an unlocked draft of
    another host is stale after `STALE_SECONDS` without a write. Where files cannot be locked at all, that applies to
    all of them. A locked draft is never stale.
    """

    def __init__(self, files: RealFiles, *, durable: bool) -> None:
        self._files = files
        self._durable = durable
        self._host = this_host()
        self._own: set[str] = set()
        """Names of drafts in progress in this process: another of its threads must not take one for stale."""

    @contextlib.contextmanager
    def write(
        self, subject: str, name: str, entry: memoryview, moment: int, folder: int, deadline: Deadline
    ) -> Iterator[Callable[[], None] | None]:
        """Writes a draft of an entry; yields what renames it to `name`, atomically, or None if the deadline passed.

        A draft that was not renamed is removed at the end, if possible.

        Raises:
            OSError: it cannot be written.
        """
        draft, fd, is_placed = draft_name(subject, self._host), None, False

        def place() -> None:
            nonlocal is_placed
            self._files.rename(draft, name, folder=folder, new_folder=folder)
            is_placed = True

        self._own.add(draft)
        try:
            fd = self._files.open(draft, _CREATE, folder=folder)
            yield place if self._claim(fd) and self._fill(fd, entry, moment, deadline) else None
        finally:
            if not is_placed:
                self._remove(draft, folder)
            self._own.discard(draft)
            if fd is not None:
                self._close(fd)

    def collect(self, name: str, age_seconds: float, folder: int) -> None:
        """Removes a draft if it is stale."""
        is_old = age_seconds > STALE_SECONDS
        if name in self._own or (not is_old and (not self._host or host_of(name) != self._host)):
            return
        try:
            fd = self._files.open(name, _OPEN, folder=folder)
        except OSError:  # no permission to open it, so its lock cannot be checked
            if is_old:
                self._remove(name, folder)
            return
        try:
            is_left = is_old
            with contextlib.suppress(OSError):
                is_left = self._files.lock(fd)
            if is_left:
                self._remove(name, folder)  # before the lock ends: a writer that comes late sees it
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

    def _remove(self, name: str, folder: int) -> None:
        with contextlib.suppress(OSError):
            self._files.remove(name, folder=folder)

    def _close(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._files.close(fd)
