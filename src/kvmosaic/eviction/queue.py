"""The eviction queue: unreferenced items in eviction order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvmosaic.eviction.policy import Candidate, EvictionPolicy

ItemT = TypeVar("ItemT", bound=Hashable)


class EvictionQueue(Generic[ItemT]):
    """Unreferenced items, lowest rank first; equal ranks are evicted in FIFO order.

    A binary heap with lazy removal: an item that is used again is only removed from the dictionary, and its place in
    the heap is skipped when it comes up. When more than half of the heap is stale it is rebuilt. So every call costs
    O(log n) on average for n items; nothing is ever scanned to find a victim.

        heap   (rank, number, item) ...     may hold stale places
        live   item -> number               exactly the queued items
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[float, int, ItemT]] = []
        self._live: dict[ItemT, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, item: object) -> bool:
        return item in self._live

    def add(self, item: ItemT, candidate: Candidate) -> None:
        """Queues an item; one that is already queued gets a new place."""
        number = next(self._numbers)
        self._live[item] = number
        heapq.heappush(self._heap, (self._policy.rank(candidate), number, item))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: ItemT) -> None:
        """Removes an item; safe for an absent one."""
        self._live.pop(item, None)

    def pop(self) -> ItemT | None:
        """Removes and returns the item to evict first; None when the queue is empty."""
        while self._heap:
            _, number, item = heapq.heappop(self._heap)
            if self._live.get(item) == number:
                del self._live[item]
                return item
        return None

    def in_order(self) -> list[ItemT]:
        """All items in eviction order; for reports and tests (it sorts)."""
        return [entry[2] for entry in sorted(self._heap) if self._live.get(entry[2]) == entry[1]]
