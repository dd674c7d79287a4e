"""Entry index of a tier: its entries, their sizes, and the order in which they are evicted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kvmosaic.cache.keys import Key
from kvmosaic.eviction import LRU, Candidate, EvictionPolicy, EvictionQueue, choose


class IndexedEntry:
    """One entry of the index; a use replaces it."""

    __slots__ = ("hits", "key", "last_used", "num_bytes", "queue_entry")

    def __init__(self, key: Key, num_bytes: int, last_used: int, hits: int) -> None:
        self.key = key
        self.num_bytes = num_bytes
        self.last_used = last_used
        """Nanoseconds since the epoch."""
        self.hits = hits
        """Uses since this process knows the entry."""
        self.queue_entry: tuple[float, int, IndexedEntry] | None = None


class EntryIndex:
    """Index of entries by key, and in eviction order.

        entries   key -> IndexedEntry      current entries
        queue     EvictionQueue            the same entries, first to evict first

    The order is that of a policy, as in the caches of the device. A policy knows the last use, uses and bytes of an
    entry, and nothing of its content: no tokens, priority or compute time. Entries of equal rank are evicted in the
    order in which they were recorded. For `lru` the rank is the last use, exact to the nanosecond; entries of other
    processes may have any time of last use.

    Invariants: `num_bytes` is the sum over all entries; every entry is in the queue.
    Always safe: dropping, or getting, an absent entry.

    Not thread-safe: a tier holds its own lock.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns, eviction: str | EvictionPolicy = "lru") -> None:
        """Makes an empty index.

        Args:
            clock: nanoseconds since the epoch.
            eviction: the name of a policy, or a policy.

        Raises:
            InvalidConfig: no such policy.
        """
        policy = choose(eviction)
        self._policy = None if type(policy) is LRU else policy
        self._clock = clock
        self._latest = 0
        self._number = 0
        self._entries: dict[Key, IndexedEntry] = {}
        self._queue: EvictionQueue[IndexedEntry] = EvictionQueue()
        self.num_bytes = 0
        self._evicted_rank = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def get(self, key: Key) -> IndexedEntry | None:
        """The record of an entry, if present."""
        return self._entries.get(key)

    def size(self, key: Key) -> int:
        """Bytes of an entry; 0 if it is absent."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry.num_bytes

    def now(self) -> int:
        """The current time for a use: later than all earlier results of this call."""
        self._latest = max(self._latest + 1, self._clock())
        return self._latest

    def add(self, key: Key, num_bytes: int, last_used: int) -> None:
        """Records an entry, replacing an earlier record but for its hits."""
        earlier = self._entries.get(key)
        self._record(key, num_bytes, last_used, 0 if earlier is None else earlier.hits)

    def use(self, key: Key, now: int) -> None:
        """Marks a use, if the entry is present."""
        entry = self._entries.get(key)
        if entry is not None:
            self._record(key, entry.num_bytes, now, entry.hits + 1)

    def drop(self, key: Key) -> None:
        """Drops an entry."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
            self._queue.remove(entry)

    def evict(self, key: Key) -> None:
        """Drops an entry for capacity: later entries rank after it, by a policy that counts evictions."""
        entry = self._entries.get(key)
        if entry is not None and entry.queue_entry is not None:
            self._evicted_rank = max(self._evicted_rank, entry.queue_entry[0])
        self.drop(key)

    def clear(self) -> None:
        """Drops all entries."""
        self._entries.clear()
        self._queue = EvictionQueue()
        self.num_bytes = 0

    def first(self) -> Key | None:
        """The entry to evict first; None if there are none."""
        entry = self._queue.first()
        return None if entry is None else entry.key

    def check_invariants(self) -> None:
        """Asserts the class invariants; for tests."""
        assert self.num_bytes == sum(entry.num_bytes for entry in self._entries.values())
        assert all(entry.key == key for key, entry in self._entries.items())
        assert len(self._queue) == len(self._entries)
        assert set(self._queue.in_order()) == set(self._entries.values())

    def _record(self, key: Key, num_bytes: int, last_used: int, hits: int) -> None:
        self.drop(key)
        self._number += 1
        self._entries[key] = entry = IndexedEntry(key, num_bytes, last_used, hits)
        entry.queue_entry = (self._rank(entry), self._number, entry)
        self.num_bytes += num_bytes
        self._queue.push(entry)

    def _rank(self, entry: IndexedEntry) -> float:
        if self._policy is None:
            return entry.last_used  # as an integer: seconds as a float would be exact to 240 ns only
        candidate = Candidate(
            entry.last_used / 1e9,
            num_tokens=0,
            hits=entry.hits,
            num_bytes=max(entry.num_bytes, 1),
            evicted_rank=self._evicted_rank,
        )
        return self._policy.rank(candidate)
