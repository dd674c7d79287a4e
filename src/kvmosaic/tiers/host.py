"""The host tier: entries in this process's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping

from kvmosaic.cache.keys import Key
from kvmosaic.config import parse_bytes
from kvmosaic.errors import TierFull, TierUnavailable
from kvmosaic.eviction import EvictionPolicy
from kvmosaic.tiers.entry_index import EntryIndex
from kvmosaic.tiers.tier import Deadline, Entry, TierCounters, TierStat, check_size

Allocate = Callable[[int], memoryview]
"""Allocates memory of so many bytes, which lives as long as the view: pinned memory, for copies to a GPU."""


class HostTier:
    """Host tier: entries in memory, at most `quota_bytes` of them, evicted in the order of a policy.

    Entries are immutable from outside: anything but `bytes` is copied on put, and memory from `allocate` is returned
    as a read-only view. An entry that is evicted while being read is no longer counted, and takes memory until its
    last reader drops it.

    Raises:
        InvalidConfig: an invalid quota, or no such policy.
    """

    name = "host"
    is_persistent = False

    def __init__(
        self,
        quota_bytes: int,
        *,
        eviction: str | EvictionPolicy = "lru",
        allocate: Allocate | None = None,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._quota = parse_bytes(quota_bytes)
        self._allocate = allocate
        self._lock = threading.Lock()
        self._entries: dict[Key, Entry] = {}
        self._index = EntryIndex(clock, eviction)
        self._tally = TierCounters()
        self._is_closed = False

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """See `Tier.put_many`. `TierFull` if memory is exhausted, `TierUnavailable` after `close`."""
        self._check_open()
        stored: set[Key] = set()
        for key, entry in entries.items():
            if deadline.has_passed:
                break
            num_bytes = memoryview(entry).nbytes
            if num_bytes > self._quota:
                continue
            try:
                kept = self._keep(entry, num_bytes)
            except MemoryError as error:
                self._tally.count(failures=1)
                raise TierFull(f"no memory for an entry of {num_bytes} bytes; make the host tier smaller") from error
            with self._lock:
                if not self._is_closed:
                    self._put(key, kept, num_bytes)
            stored.add(key)
        with self._lock:
            return stored & self._entries.keys()

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        """See `Tier.get_many`. The entries are shared and read-only."""
        found: dict[Key, Entry] = {}
        for key in keys:
            if deadline.has_passed:
                break
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None:
                    check_size(key, self._index.size(key), max_bytes)
                    found[key] = entry
                    self._index.use(key, self._index.now())
            num_bytes = 0 if entry is None else memoryview(entry).nbytes
            self._tally.count(hits=entry is not None, misses=entry is None, get_bytes=num_bytes)
        return found

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.exists_many`."""
        with self._lock:
            return {key for key in keys if key in self._entries}

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.delete_many`."""
        with self._lock:
            return {key for key in keys if self._drop(key)}

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """See `Tier.touch`."""
        with self._lock:
            for key in keys:
                self._index.use(key, self._index.now())

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """Deletes the entry: there is no place to inspect it afterwards."""
        with self._lock:
            is_gone = self._drop(key)
        self._tally.count(quarantined=is_gone)

    def stat(self) -> TierStat:
        """See `Tier.stat`."""
        with self._lock:
            num_entries, num_bytes = len(self._index), self._index.num_bytes
        return TierStat(
            name=self.name,
            address="",
            num_entries=num_entries,
            num_bytes=num_bytes,
            quota_bytes=self._quota,
            **self._tally.counts(),
        )

    def close(self) -> None:
        """Drops all entries and closes the tier for further calls."""
        with self._lock:
            self._is_closed = True
            self._entries.clear()
            self._index.clear()

    def check_invariants(self) -> None:
        """Asserts the class invariants; for tests."""
        with self._lock:
            self._index.check_invariants()
            assert self._entries.keys() == set(self._index)
            assert all(memoryview(entry).nbytes == self._index.size(key) for key, entry in self._entries.items())
            assert self._index.num_bytes <= self._quota

    def _check_open(self) -> None:
        if self._is_closed:
            self._tally.count(failures=1)
            raise TierUnavailable("the host tier is closed")

    def _keep(self, entry: Entry, num_bytes: int) -> Entry:
        """A copy of the entry in memory of this tier."""
        if self._allocate is None:
            return entry if isinstance(entry, bytes) else bytes(entry)
        room = self._allocate(num_bytes)
        room[:] = memoryview(entry).cast("B")
        return room.toreadonly()

    def _put(self, key: Key, entry: Entry, num_bytes: int) -> None:
        now = self._index.now()
        self._index.use(key, now)  # the replaced entry must not be evicted for its own replacement
        num_evicted = 0
        while self._index.num_bytes - self._index.size(key) + num_bytes > self._quota:
            victim = self._index.first()
            assert victim is not None
            self._index.evict(victim)
            del self._entries[victim]
            num_evicted += 1
        self._entries[key] = entry
        self._index.add(key, num_bytes, now)
        self._tally.count(puts=1, put_bytes=num_bytes, evictions=num_evicted)

    def _drop(self, key: Key) -> bool:
        self._index.drop(key)
        return self._entries.pop(key, None) is not None
