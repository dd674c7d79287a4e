"""The line of idle things, in the order in which they leave."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

from kvmosaic.eviction.policy import Candidate, EvictionPolicy

ItemT = TypeVar("ItemT", bound=Hashable)


class EvictionQueue(Generic[ItemT]):
    """Idle items, lowest rank first; equal ranks leave in the order in which they came.

    A binary heap with lazy removal: an item that is used again only leaves the dictionary, and its place in the heap
    is skipped when it comes up. When more than half of the heap is such leftovers it is rebuilt. So every call costs
    O(log n) on average, however many items wait; nothing is ever scanned to find a victim.

        heap   (rank, number, item) ...     may hold leftovers
        live   item -> number               exactly the items in line
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
        """Puts an item in line; one that is already there gets its new place."""
        number = next(self._numbers)
        self._live[item] = number
        heapq.heappush(self._heap, (self._policy.rank(candidate), number, item))
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: ItemT) -> None:
        """Takes an item out of the line; safe for one that is not there."""
        self._live.pop(item, None)

    def pop(self) -> ItemT | None:
        """Takes out the item that leaves first; None when the line is empty."""
        while self._heap:
            _, number, item = heapq.heappop(self._heap)
            if self._live.get(item) == number:
                del self._live[item]
                return item
        return None

    def in_order(self) -> list[ItemT]:
        """All items, first to leave first; for reports and tests (it sorts)."""
        return [entry[2] for entry in sorted(self._heap) if self._live.get(entry[2]) == entry[1]]
