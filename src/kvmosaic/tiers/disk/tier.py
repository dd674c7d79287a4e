"""The disk tier: one file per entry in a folder that several processes may share."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from kvmosaic.cache.keys import Key
from kvmosaic.config import parse_bytes
from kvmosaic.errors import TierFull, TierUnavailable
from kvmosaic.eviction import EvictionPolicy
from kvmosaic.tiers.disk.files import RealFiles
from kvmosaic.tiers.disk.folder import EntryFolder
from kvmosaic.tiers.disk.store import DiskStore
from kvmosaic.tiers.tier import Deadline, Entry, TierCounters, TierStat

logger = logging.getLogger("kvmosaic.tiers")

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_TRIMMING_SECONDS = 1.0
"""Time limit for evicting what is above the quota when opening a folder; the rest is evicted by the next put."""


class DiskTier:
    """Disk tier: entries as files, at most `quota_bytes` of them, evicted in the order of a policy.

    Entries outlive the process, however it ends. `DiskStore` documents sharing between processes, `EntryFolder` the
    folder's layout. Nothing is kept open between calls.

    A read-only folder can still be read: then `put_many` raises, and `get_many` does not.

    Raises:
        InvalidConfig: not a folder, one with foreign files in it, or of another version; an invalid quota; no
            such policy.
        TierUnavailable: the folder cannot be made, listed or marked now.
    """

    name = "disk"
    is_persistent = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        quota_bytes: int,
        *,
        durable: bool = True,
        eviction: str | EvictionPolicy = "lru",
        files: RealFiles | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """Opens the folder.

        Args:
            folder: created if it does not exist.
            quota_bytes: maximum bytes of entries and drafts.
            durable: sync each entry to disk, so that it also survives a power failure.
            eviction: a policy or its name. Uses are counted by this process, since it opened the folder.
            files: file system calls.
            clock: nanoseconds since the epoch.
        """
        self._quota = parse_bytes(quota_bytes)
        self._path = Path(os.path.abspath(folder))  # noqa: PTH100  resolve() would follow links
        self._tally = TierCounters()
        self._is_closed = False
        with self._failing():
            entries = EntryFolder(self._path, files or RealFiles(), durable=durable)
            self._store = DiskStore(entries, self._quota, self._tally, clock, eviction)
            self._store.see_others(0, Deadline())
        with contextlib.suppress(TierUnavailable), self._failing():
            self._store.trim(Deadline(_TRIMMING_SECONDS))

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """See `Tier.put_many`. May take longer than its deadline by one piece of 16 MiB and its sync."""
        placed: set[Key] = set()
        with self._failing(can_be_full=True):
            for key, entry in entries.items():
                view = memoryview(entry).cast("B")
                if deadline.has_passed:
                    break
                if view.nbytes > self._store.max_entry_bytes:
                    continue
                if self._store.put(key, view, deadline):
                    placed.add(key)
            return self._store.sync(placed)

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        """See `Tier.get_many`. An unreadable entry is quarantined, and the call raises."""
        found: dict[Key, Entry] = {}
        with self._failing():
            for key in keys:
                if deadline.has_passed:
                    break
                entry = self._store.get(key, max_bytes)
                if entry is not None:
                    found[key] = entry
                self._tally.count(hits=entry is not None, misses=entry is None, get_bytes=len(entry or b""))
        return found

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.exists_many`."""
        with self._failing():
            return {key for key in keys if not deadline.has_passed and self._store.exists(key)}

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.delete_many`."""
        with self._failing():
            return {key for key in keys if not deadline.has_passed and self._store.remove(key)}

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """See `Tier.touch`."""
        with self._failing():
            for key in keys:
                if not deadline.has_passed:
                    self._store.touch(key)

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """Moves the entry to the folder `quarantine`, or removes it if that fails."""
        with self._failing():
            if self._store.quarantine(key):
                logger.warning("%s: entry %s was put aside: %s", self._path, key.hex(), reason)

    def stat(self) -> TierStat:
        """See `Tier.stat`."""
        return TierStat(
            name=self.name,
            address=str(self._path),
            num_entries=self._store.num_entries,
            num_bytes=self._store.num_bytes,
            quota_bytes=self._quota,
            **self._tally.counts(),
        )

    def close(self) -> None:
        """Closes the tier for further calls."""
        self._is_closed = True

    def check_invariants(self) -> None:
        """Asserts the class invariants; for tests."""
        self._store.check_invariants()

    @contextlib.contextmanager
    def _failing(self, *, can_be_full: bool = False) -> Iterator[None]:
        """Translates operating system errors into tier errors."""
        try:
            if self._is_closed:
                raise TierUnavailable(f"the disk tier {self._path} is closed")
            yield
        except (OSError, MemoryError) as error:
            self._tally.count(failures=1)
            if can_be_full and isinstance(error, OSError) and error.errno in _FULL:
                raise TierFull(f"{self._path}: {error.strerror}; make the quota smaller than what is free") from error
            raise TierUnavailable(f"{self._path}: {getattr(error, 'strerror', None) or 'no memory'}") from error
        except TierUnavailable:
            self._tally.count(failures=1)
            raise
