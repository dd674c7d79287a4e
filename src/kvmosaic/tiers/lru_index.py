"""LRU index of a tier: its entries, their sizes, and the order in which they are evicted."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvmosaic.cache.keys import Key

_MAX_STALE = 64
"""Maximum stale items in the heap, on top of twice the entries."""


class LRUEntry(NamedTuple):
    """One entry of the index. Entries sort by eviction order: the least recently used one comes first."""

    last_used: int
    """Nanoseconds since the epoch."""
    turn: int
    """Counts up; of two entries with equal last use, the one recorded first is evicted first."""
    key: Key
    num_bytes: int


class LRUIndex:
    """Index of entries by key, and in the order of their last use.

        lines   key -> LRUEntry      current entries
        queue   heap of entries      eviction order; entries no longer in `lines` are skipped

    Entries of other processes may have any time of last use, so the order is a heap and not a list.

    Invariants: `num_bytes` is the sum over all entries; every entry is in the queue.
    Always safe: dropping, or getting, an absent entry.

    Not thread-safe: a tier holds its own lock.
    """

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._latest = 0
        self._turn = 0
        self._lines: dict[Key, LRUEntry] = {}
        self._queue: list[LRUEntry] = []
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, key: Key) -> bool:
        return key in self._lines

    def __iter__(self) -> Iterator[Key]:
        return iter(self._lines)

    def get(self, key: Key) -> LRUEntry | None:
        """The record of an entry, if present."""
        return self._lines.get(key)

    def size(self, key: Key) -> int:
        """Bytes of an entry; 0 if it is absent."""
        line = self._lines.get(key)
        return 0 if line is None else line.num_bytes

    def now(self) -> int:
        """The current time for a use: later than all earlier results of this call."""
        self._latest = max(self._latest + 1, self._clock())
        return self._latest

    def add(self, key: Key, num_bytes: int, last_used: int) -> None:
        """Records an entry, replacing an earlier record."""
        self.drop(key)
        self._turn += 1
        self._lines[key] = line = LRUEntry(last_used, self._turn, key, num_bytes)
        self.num_bytes += num_bytes
        heapq.heappush(self._queue, line)

    def use(self, key: Key, now: int) -> None:
        """Marks a use, if the entry is present."""
        line = self._lines.get(key)
        if line is not None:
            self.add(key, line.num_bytes, now)

    def drop(self, key: Key) -> None:
        """Drops an entry."""
        line = self._lines.pop(key, None)
        if line is not None:
            self.num_bytes -= line.num_bytes
            if len(self._queue) > 2 * len(self._lines) + _MAX_STALE:
                self._queue = list(self._lines.values())
                heapq.heapify(self._queue)

    def clear(self) -> None:
        """Drops all entries."""
        self._lines.clear()
        self._queue.clear()
        self.num_bytes = 0

    def oldest(self) -> Key | None:
        """The least recently used entry."""
        while self._queue:
            line = self._queue[0]
            if self._lines.get(line.key) is line:
                return line.key
            heapq.heappop(self._queue)
        return None

    def check_invariants(self) -> None:
        """Asserts the class invariants; for tests."""
        assert self.num_bytes == sum(line.num_bytes for line in self._lines.values())
        assert all(line.key == key for key, line in self._lines.items())
        assert set(self._queue) >= set(self._lines.values())
        assert len(self._queue) <= 2 * len(self._lines) + _MAX_STALE
