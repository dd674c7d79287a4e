"""A line of idle things that know their own place in it."""

from __future__ import annotations

import heapq
from typing import Any, Generic, Protocol, TypeVar


class Placed(Protocol):
    """What can stand in lines: in several at once, with one place in all of them, or in none."""

    place: tuple[float, int, Any] | None
    """Rank, a number of its own, and the item itself."""


ItemT = TypeVar("ItemT", bound=Placed)


class EvictionLine(Generic[ItemT]):
    """Idle items, lowest rank first; of equal ranks, the lower number first. An `EvictionQueue` in less memory.

        heap   place, place, …       may hold leftovers: places that their items have given up

    An item gives its place up by forgetting it (`item.place = None`), and then says so to every line that it stood in.
    So no line needs to know who is in it, and two lines share one place. Leftovers at the head are thrown away at once,
    and all of them when they are more than half of the heap: every call costs O(log n) on average, and nothing that
    has gone is kept alive for long.

    Invariants: the head of the heap is no leftover; len(self) items know a place in the heap.
    """

    __slots__ = ("_heap", "_num_items")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, ItemT]] = []
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def enter(self, place: tuple[float, int, ItemT]) -> None:
        """Takes in an item that has just got this place."""
        heapq.heappush(self._heap, place)
        self._num_items += 1

    def has_left(self) -> None:
        """Notes that an item of this line has given its place up."""
        self._num_items -= 1
        if len(self._heap) > 2 * self._num_items + 64:
            self._heap = [place for place in self._heap if place[2].place is place]
            heapq.heapify(self._heap)
        while self._heap and self._heap[0][2].place is not self._heap[0]:
            heapq.heappop(self._heap)

    def first(self) -> ItemT | None:
        """The item that leaves first; None when nobody is in line."""
        return self._heap[0][2] if self._heap else None

    def in_order(self) -> list[ItemT]:
        """All items, first to leave first; for reports and tests (it sorts)."""
        return [place[2] for place in sorted(self._heap) if place[2].place is place]
