"""An eviction queue of items that store their own place."""

from __future__ import annotations

import heapq
from typing import Any, Generic, Protocol, TypeVar


class Placed(Protocol):
    """An item of eviction queues: with one place in all of its queues, or None."""

    place: tuple[float, int, Any] | None
    """Rank, a unique number, and the item itself."""


ItemT = TypeVar("ItemT", bound=Placed)


class EvictionLine(Generic[ItemT]):
    """Unreferenced items, lowest rank first, then lowest number. An `EvictionQueue` in less memory.

        heap   place, place, …       may hold stale places, which their items have given up

    An item is removed lazily: its owner sets `item.place = None`, and then notifies every queue that contains it
    (`has_left`). So no queue needs an index of its items, and two queues share one place. Stale places at the head are
    dropped at once, and all of them when they are more than half of the heap: every call costs O(log n) on average,
    and no removed item is kept alive for long.

    Invariants: the head of the heap is not stale; len(self) items have a place in the heap.
    """

    __slots__ = ("_heap", "_num_items")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ItemT]] = []
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def enter(self, place: tuple[float, int, ItemT]) -> None:
        """Adds an item that has just got this place."""
        heapq.heappush(self._heap, place)
        self._num_items += 1

    def has_left(self) -> None:
        """Notes that one item of this queue has given up its place."""
        self._num_items -= 1
        if len(self._heap) > 2 * self._num_items + 64:
            self._heap = [place for place in self._heap if place[2].place is place]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][2].place is not self._heap[0]:
            heapq.heappop(self._heap)

    def first(self) -> ItemT | None:
        """The item to evict first; None when the queue is empty."""
        return self._heap[0][2] if self._heap else None

    def in_order(self) -> list[ItemT]:
        """All items in eviction order; for reports and tests (it sorts)."""
        return [place[2] for place in sorted(self._heap) if place[2].place is place]
