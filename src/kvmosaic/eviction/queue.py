"""The eviction queue: unreferenced items in eviction order."""

from __future__ import annotations

import heapq
from typing import Any, Generic, Protocol, TypeVar


class Evictable(Protocol):
    """An item of eviction queues, with one entry in all of its queues."""

    queue_entry: tuple[float, int, Any] | None
    """Eviction rank, a unique number, and the item itself; None: in no queue."""


ItemT = TypeVar("ItemT", bound=Evictable)


class EvictionQueue(Generic[ItemT]):
    """Unreferenced items, lowest rank first, then lowest number.

        heap   entry, entry, …       may hold stale entries, of items that were removed

    A binary heap with lazy removal. The item stores its entry, so no queue needs an index of its items, and several
    queues share one entry. Stale entries at the head are dropped at once, and all of them when they are more than half
    of the heap: every call costs O(log n) on average for n items, and no removed item is kept alive for long.

    Invariants: the head of the heap is not stale; len(self) items have an entry in the heap.
    """

    __slots__ = ("_heap", "_num_items")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ItemT]] = []
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def push(self, item: ItemT) -> None:
        """Adds an item whose `queue_entry` was just set."""
        assert item.queue_entry is not None
        heapq.heappush(self._heap, item.queue_entry)
        self._num_items += 1

    def remove(self, item: ItemT) -> None:
        """Removes an item, and its entry; call it once on every queue that the item was pushed to."""
        item.queue_entry = None
        self._num_items -= 1
        if len(self._heap) > 2 * self._num_items + 64:
            self._heap = [entry for entry in self._heap if entry[2].queue_entry is entry]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][2].queue_entry is not self._heap[0]:
            heapq.heappop(self._heap)

    def first(self) -> ItemT | None:
        """The item to evict first; None when the queue is empty."""
        return self._heap[0][2] if self._heap else None

    def in_order(self) -> list[ItemT]:
        """All items in eviction order; for reports and tests (it sorts)."""
        return [entry[2] for entry in sorted(self._heap) if entry[2].queue_entry is entry]
