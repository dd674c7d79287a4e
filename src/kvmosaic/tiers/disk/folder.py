"""The folder of a disk tier: atomically written files under reserved names, first as drafts."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmosaic.cache.keys import Key
from kvmosaic.errors import TierUnavailable
from kvmosaic.tiers.disk.files import (
    MARKER,
    QUARANTINE,
    SHARDS,
    RealFiles,
    aside_name,
    draft_name,
    entry_name,
    host_of,
    is_draft,
    key_of,
    moment_of,
    prepare,
    shard_of,
    this_host,
)
from kvmosaic.tiers.tier import Deadline, check_size

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


MAX_ASIDE = 16
"""Maximum files in quarantine."""
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe with our name must not block
_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO))
"""Nothing there, or something that we never write: a link, a socket."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size and last use of an entry's file."""

    num_bytes: int
    last_used: int
    """Nanoseconds since the epoch: the modification time, which every use sets."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Contents of one of the entry folders."""

    entries: dict[Key, FileFacts]
    blocked: tuple[Key, ...]
    """Keys whose file name is taken by a folder."""


class EntryFolder:
    """Entry files in one folder that several processes share.

        <folder>/.kvmosaic-tier.json                    marks the folder as ours, with its version
        <folder>/<2 hex>/<key hex>.safetensors          an entry: complete, never modified
        <folder>/<2 hex>/.<key hex>.….partial           a draft: an entry that is being written; see `DraftFiles`
        <folder>/quarantine/<key hex>.<time>.safetensors

    An entry is written as a draft, which is then renamed atomically. So a reader always gets a whole entry, also if it
    is replaced or removed meanwhile, and a kill at any moment leaves a draft at worst.

    Links are not followed below the folder, and only files with reserved names are ever removed. Everything raises
    `OSError`; a missing file is no error.
    """

    def __init__(self, path: Path, files: RealFiles, *, durable: bool) -> None:
        """Claims the folder if it is new or empty. See `prepare` for what is rejected."""
        self.top = str(path)
        """The folder."""
        self._files = files
        self._durable = durable
        self._drafts = DraftFiles(files, durable=durable)
        prepare(self.top, files)

    @contextlib.contextmanager
    def draft(
        self, key: Key, entry: memoryview, moment: int, deadline: Deadline
    ) -> Iterator[Callable[[], None] | None]:
        """Writes an entry as a draft; yields what renames it to the entry of its key; None if the deadline passed.

        Renaming raises IsADirectoryError where a folder has its name.
        """
        name = entry_name(key)
        with (
            self._inside(shard_of(key), make=True) as folder,
            self._drafts.write(key.hex(), name, entry, moment, folder, deadline) as place,
        ):
            yield place

    def path(self, key: Key) -> str:
        """The file of an entry, present or not."""
        return f"{self.top}/{shard_of(key)}/{entry_name(key)}"

    def sync(self, keys: Iterable[Key]) -> None:
        """Waits until the names of these entries would survive a power failure."""
        if self._durable:
            for shard in sorted({shard_of(key) for key in keys}):
                with self._inside(shard) as folder:
                    self._files.sync(folder)

    def read(self, key: Key, max_entry_bytes: int, moment: int, max_bytes: int | None = None) -> bytes | None:
        """A whole entry, marked as used at that moment; None if it is absent, or larger than `max_entry_bytes`.

        Raises:
            DamagedEntry: larger than `max_bytes`; it was not read.
        """
        with _absence_allowed(), self._opened(key) as (fd, num_bytes):
            if num_bytes is None:
                return None
            check_size(key, num_bytes, max_bytes)
            if num_bytes > max_entry_bytes:
                return None
            entry = self._read_whole(fd, num_bytes)
            with contextlib.suppress(OSError):  # a read-only folder can still be read
                self._files.set_time(fd, moment)
            return entry
        return None

    def facts(self, key: Key) -> FileFacts | None:
        """Size and last use of an entry; None if it is absent."""
        with _absence_allowed(), self._inside(shard_of(key)) as folder:
            return self._facts(entry_name(key), folder)
        return None

    def touch(self, key: Key, moment: int) -> bool:
        """Marks a use; returns whether the entry is present."""
        with _absence_allowed(), self._inside(shard_of(key)) as folder:
            if self._facts(entry_name(key), folder) is not None:
                self._files.set_time(entry_name(key), moment, folder=folder)
                return True
        return False

    def remove(self, key: Key) -> bool:
        """Removes an entry; returns whether there was one."""
        with _absence_allowed(), self._inside(shard_of(key)) as folder:
            if self._facts(entry_name(key), folder) is not None:
                self._files.remove(entry_name(key), folder=folder)
                return True
        return False

    def quarantine(self, key: Key, moment: int, max_entry_bytes: int) -> bool:
        """Moves an entry to the quarantine, or removes it if that fails; returns whether there was one.

        The quarantine keeps the latest files: at most `MAX_ASIDE`, and at most `max_entry_bytes`.
        """
        facts = self.facts(key)
        if facts is None:
            return False
        if facts.num_bytes > max_entry_bytes:
            return self.remove(key)
        try:
            with self._inside(QUARANTINE, make=True) as aside:
                with contextlib.suppress(OSError):  # first, so that a kill in between leaves no more than the limit
                    self._trim(aside, MAX_ASIDE - 1, max_entry_bytes - facts.num_bytes)
                with self._inside(shard_of(key)) as folder:
                    self._files.rename(entry_name(key), aside_name(key, moment), folder=folder, new_folder=aside)
        except (OSError, TierUnavailable):
            return self.remove(key)
        return True

    def shards(self) -> set[str]:
        """The existing shards."""
        with self._inside(".") as folder:
            return set(SHARDS).intersection(self._files.names(folder))

    def look_into(self, shard: str, now: int) -> Shard:
        """Lists one of the `SHARDS`; removes stale drafts of dead writers."""
        found: dict[Key, FileFacts] = {}
        blocked: list[Key] = []
        with _absence_allowed(), self._inside(shard) as folder:
            for name in self._files.names(folder):
                key = key_of(name, shard)
                if key is None and not is_draft(name):
                    continue
                try:
                    facts = self._files.facts_of(name, folder=folder)
                except FileNotFoundError:
                    continue
                if key is not None and stat.S_ISDIR(facts.st_mode):
                    blocked.append(key)
                if not stat.S_ISREG(facts.st_mode):
                    continue
                if key is not None:
                    found[key] = FileFacts(facts.st_size, facts.st_mtime_ns)
                else:
                    self._drafts.collect(name, abs(now - facts.st_mtime_ns) / 1e9, folder)
        return Shard(found, tuple(blocked))

    @contextlib.contextmanager
    def _inside(self, name: str, *, make: bool = False) -> Iterator[int]:
        """Opens a subfolder; a link in its place counts as absent."""
        path = f"{self.top}/{name}"
        try:
            fd = self._files.open(path, _FOLDER)
        except FileNotFoundError:
            if not make:
                raise
            self._make(path)
            fd = self._files.open(path, _FOLDER)
        with self._closing(fd):
            yield fd

    def _make(self, path: str) -> None:
        with self._closing(self._files.open(self.top, _FOLDER & ~getattr(os, "O_NOFOLLOW", 0))) as top:
            try:
                self._files.facts_of(MARKER, folder=top)
            except FileNotFoundError as error:  # not mounted any more? then writes would fill another disk
                raise TierUnavailable(f"{self.top} is not the folder of a disk tier any more: no {MARKER}") from error
            with contextlib.suppress(FileExistsError):
                self._files.make_folder(path)
            if self._durable:
                self._files.sync(top)

    @contextlib.contextmanager
    def _opened(self, key: Key) -> Iterator[tuple[int, int | None]]:
        """The open file of an entry and its size; None for these if it is no regular file."""
        with self._inside(shard_of(key)) as folder:
            fd = self._files.open(entry_name(key), _READ, folder=folder)
            with self._closing(fd):
                facts = self._files.facts(fd)
                yield fd, facts.st_size if stat.S_ISREG(facts.st_mode) else None

    @contextlib.contextmanager
    def _closing(self, fd: int) -> Iterator[int]:
        """Closes the fd at the end; an error then loses nothing."""
        try:
            yield fd
        finally:
            with contextlib.suppress(OSError):
                self._files.close(fd)

    def _read_whole(self, fd: int, num_bytes: int) -> bytes | None:
        entry = self._files.read(fd, num_bytes)
        if len(entry) == num_bytes:
            return entry
        pieces = [entry]  # the operating system gives at most 2 GiB at once
        missing = num_bytes - len(entry)
        while missing > 0 and (entry := self._files.read(fd, missing)):
            pieces.append(entry)
            missing -= len(entry)
        return b"".join(pieces) if missing == 0 else None

    def _facts(self, name: str, folder: int) -> FileFacts | None:
        try:
            facts = self._files.facts_of(name, folder=folder)
        except FileNotFoundError:
            return None
        return FileFacts(facts.st_size, facts.st_mtime_ns) if stat.S_ISREG(facts.st_mode) else None

    def _trim(self, aside: int, max_files: int, max_entry_bytes: int) -> None:
        num_files = num_bytes = 0
        for _, name in sorted(
            ((moment, name) for name in self._files.names(aside) if (moment := moment_of(name)) is not None),
            reverse=True,
        ):
            facts = self._facts(name, aside)
            if facts is None:
                continue
            num_files += 1
            num_bytes += facts.num_bytes
            if num_files > max_files or num_bytes > max_entry_bytes:
                with contextlib.suppress(OSError):
                    self._files.remove(name, folder=aside)


@contextlib.contextmanager
def _absence_allowed() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
