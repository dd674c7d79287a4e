"""The store of a disk tier: entry folder, entry index and quota."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable

from kvmosaic.cache.keys import Key
from kvmosaic.eviction import EvictionPolicy
from kvmosaic.tiers.disk.files import shard_of
from kvmosaic.tiers.disk.folder import EntryFolder, FileFacts
from kvmosaic.tiers.entry_index import EntryIndex
from kvmosaic.tiers.tier import MAX_ENTRY_BYTES, Deadline, Notices, TierCounters

logger = logging.getLogger("kvmosaic.tiers")

_UNSEEN = 1 / 16
"""Share of the quota that a process writes at most before it lists the folder again."""
_ASIDE = 1 / 16
"""Share of the quota that the quarantine may take on top of it."""


class DiskStore:
    """Store of entries in a folder, with an index for the eviction order.

        put:  [ lock: evict until it fits ] ──▶ draft ──written──▶ [ lock: rename ] ──▶ sync
        index: this process's view of the folder     files: the truth, for every process

    Whether an entry exists is read from the folder each time. So entries of other processes are found, and entries
    that they remove are misses. Before an entry is evicted, its file tells its last use, by any process.

    Other processes: each enforces the quota by its own index, and lists the folder again before it has written more
    than a sixteenth of the quota since the last listing. With N of them, entries take at most 1 + N / 16 times the
    quota, and their drafts come on top. All should have the same quota; otherwise the smallest applies.

    Drafts of this process count: space is reserved before one is written, and where that is not enough to keep an
    earlier version of the entry meanwhile, that version is evicted first. A listing removes stale drafts of other
    writers. An entry larger than the quota is removed when it is seen.

    Reading, writing and waiting for the disk happen outside the lock; renaming, removing and listing one shard
    inside. So the index is exact for entries that only this process writes.

    Everything raises `OSError`.
    """

    def __init__(
        self,
        folder: EntryFolder,
        quota_bytes: int,
        tally: TierCounters,
        clock: Callable[[], int] = time.time_ns,
        eviction: str | EvictionPolicy = "lru",
    ) -> None:
        self._folder = folder
        self._quota = quota_bytes
        self._tally = tally
        self._clock = clock
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._index = EntryIndex(clock, eviction)
        self._unseen_bytes = math.inf
        """Bytes written since the last listing."""
        self._to_see: dict[str, list[Key]] = {}
        self._staged_bytes = 0
        """Bytes of drafts in progress in this process."""
        self._notices = Notices(logger)

    @property
    def num_entries(self) -> int:
        """Entries in the index. Never waits: the lock may be held by a call that waits for the disk."""
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries in the index."""
        return self._index.num_bytes

    @property
    def max_entry_bytes(self) -> int:
        """Maximum bytes of an entry that is stored or returned."""
        return min(self._quota, MAX_ENTRY_BYTES)

    def put(self, key: Key, entry: memoryview, deadline: Deadline) -> bool:
        """Stores an entry, not yet synced to disk; False if there was no space, or it timed out."""
        num_bytes = entry.nbytes
        if not self.see_others(num_bytes, deadline):
            return False
        with self._lock:
            now = self._index.now()
            if not self._reserve(key, num_bytes, now, deadline):
                return False
        is_placed = False
        try:
            with self._folder.draft(key, entry, now, deadline) as place, self._lock:
                if place is not None and self._make_room(key, 0, deadline):
                    place()
                    is_placed = True
                    self._staged_bytes -= num_bytes
                    self._index.add(key, num_bytes, now)
                    self._unseen_bytes += num_bytes
        except IsADirectoryError:
            self._note_blocked(key)
        finally:
            if not is_placed:
                with self._lock:
                    self._staged_bytes -= num_bytes
        self._tally.count(puts=is_placed, put_bytes=num_bytes * is_placed)
        return is_placed

    def sync(self, keys: set[Key]) -> set[Key]:
        """Syncs stored entries to disk; returns the keys that are still present."""
        self._folder.sync(keys)
        with self._lock:
            return {key for key in keys if key in self._index}

    def get(self, key: Key, max_bytes: int | None = None) -> bytes | None:
        """The whole entry. An unreadable one is quarantined.

        Raises:
            DamagedEntry: larger than `max_bytes`; it was not read.
        """
        with self._lock:
            now = self._index.now()
        try:
            entry = self._folder.read(key, self.max_entry_bytes, now, max_bytes)
        except OSError as error:
            if error.errno == errno.EIO:  # quarantine it: one bad sector must not make the whole tier fail repeatedly
                with contextlib.suppress(OSError):
                    self.quarantine(key)
            raise
        with self._lock:
            if entry is not None and self._index.size(key) == len(entry):
                self._index.use(key, now)
            elif entry is not None or key in self._index:
                self._refresh(key)
        return entry

    def exists(self, key: Key) -> bool:
        """Whether the entry exists now."""
        with self._lock:
            return self._refresh(key)

    def touch(self, key: Key) -> None:
        """Marks a use."""
        with self._lock:
            now = self._index.now()
            self._folder.touch(key, now)
            if self._refresh(key):
                self._index.use(key, now)

    def remove(self, key: Key) -> bool:
        """Removes an entry; returns whether there was one."""
        with self._lock:
            was_there = self._folder.remove(key)
            self._index.drop(key)
        return was_there

    def quarantine(self, key: Key) -> bool:
        """Moves an entry to the quarantine; returns whether there was one."""
        with self._lock:
            was_there = self._folder.quarantine(key, self._index.now(), int(self._quota * _ASIDE))
            self._index.drop(key)
        self._tally.count(quarantined=was_there)
        return was_there

    def trim(self, deadline: Deadline) -> None:
        """Evicts entries until the quota is met."""
        with self._lock:
            self._make_room(None, 0, deadline)

    def see_others(self, num_bytes: int, deadline: Deadline) -> bool:
        """Lists the folder if a listing is due before so many bytes are written; False if that timed out.

        The next call continues where this one stopped.
        """
        if not self._looking.acquire(blocking=False):
            return True
        try:
            if not self._to_see and self._unseen_bytes + num_bytes > self._quota * _UNSEEN:
                self._to_see = self.shards()
                with self._lock:
                    self._unseen_bytes = 0
            while self._to_see:
                if deadline.has_passed:
                    return False
                shard = next(iter(self._to_see))
                self.look_into(shard, self._to_see[shard])
                del self._to_see[shard]
            return True
        finally:
            self._looking.release()

    def shards(self) -> dict[str, list[Key]]:
        """All shards, each with its known keys."""
        with self._lock:
            known: dict[str, list[Key]] = {}
            for key in self._index:
                known.setdefault(shard_of(key), []).append(key)
        return {shard: known.get(shard, []) for shard in sorted(self._folder.shards() | known.keys())}

    def look_into(self, shard: str, known: Iterable[Key]) -> dict[Key, FileFacts]:
        """Lists a shard; drops keys in `known` that are still in the index, but have no file any more."""
        with self._lock:
            found = self._folder.look_into(shard, self._clock())
            for key in found.blocked:
                self._note_blocked(key)
            for key in known:
                if key not in found.entries:
                    self._index.drop(key)
            for key, facts in found.entries.items():
                self._write_down(key, facts)
        return found.entries

    def check_invariants(self) -> None:
        """Asserts the class invariants; for tests."""
        with self._lock:
            self._index.check_invariants()

    def _reserve(self, key: Key, num_bytes: int, now: int, deadline: Deadline) -> bool:
        """Reserves space for a draft; False if there is none, or it timed out."""
        self._index.use(key, now)  # the replaced entry must not be evicted for its own replacement
        if not self._make_room(key, num_bytes, deadline):
            return False
        if self._index.size(key) and self._taken(None) + num_bytes > self._quota:
            self._folder.remove(key)
            self._index.drop(key)
        self._staged_bytes += num_bytes
        return True

    def _taken(self, key: Key | None) -> int:
        """Bytes of drafts of this process and of entries, without the one to be replaced."""
        return self._index.num_bytes - (self._index.size(key) if key else 0) + self._staged_bytes

    def _make_room(self, key: Key | None, num_bytes: int, deadline: Deadline) -> bool:
        """Evicts entries until so many bytes fit in place of the key's entry; False if that is not possible."""
        reprieves = len(self._index)
        while self._taken(key) + num_bytes > self._quota:
            victim = self._index.first()
            if deadline.has_passed or victim is None:
                return False
            line, facts = self._index.get(victim), self._folder.facts(victim)
            assert line is not None
            if facts is not None and facts.last_used > line.last_used and reprieves > 0:  # used by another process
                reprieves -= 1
                self._index.add(victim, facts.num_bytes, facts.last_used)
                continue
            self._tally.count(evictions=self._folder.remove(victim))
            self._index.evict(victim)
        return True

    def _refresh(self, key: Key) -> bool:
        """Updates the index from an entry's file; returns whether it exists."""
        return self._write_down(key, self._folder.facts(key))

    def _write_down(self, key: Key, facts: FileFacts | None) -> bool:
        line = self._index.get(key)
        if facts is not None and facts.num_bytes > self._quota:  # counting it would evict all others
            with contextlib.suppress(OSError):
                self._tally.count(evictions=self._folder.remove(key))
            facts = None
        if facts is None:
            self._index.drop(key)
        elif line is None or line.num_bytes != facts.num_bytes or line.last_used < facts.last_used:
            self._index.add(key, facts.num_bytes, facts.last_used)
        return facts is not None

    def _note_blocked(self, key: Key) -> None:
        path = self._folder.path(key)
        self._notices.warn_once(
            path, f"{path} is a folder in place of an entry: this entry cannot be kept; remove the folder"
        )
