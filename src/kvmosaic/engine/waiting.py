"""Waiting queue: sequences in the order of their rank."""

from __future__ import annotations

import heapq
from itertools import count

from kvmosaic.engine.sequence import Sequence

_SLACK = 64


class WaitingQueue:
    """A heap of sequences; those that were taken out stay in it as dead entries until they come up or are too many.

        entries   (rank, number, sequence), the smallest first
        numbers   sequence -> the number of its entry, if it waits

    Adding and removing cost O(log n). Equal ranks leave in the order in which they came.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, float, int], int, Sequence]] = []
        self._numbers: dict[Sequence, int] = {}
        self._count = count()

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._numbers

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence that does not wait yet."""
        assert sequence not in self._numbers, "a sequence waits once"
        number = self._numbers[sequence] = next(self._count)
        heapq.heappush(self._entries, (sequence.rank, number, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out; one that does not wait is left alone."""
        if self._numbers.pop(sequence, None) is None:
            return
        if len(self._entries) > 2 * len(self._numbers) + _SLACK:
            self._entries = [entry for entry in self._entries if self._is_alive(entry[1], entry[2])]
            heapq.heapify(self._entries)

    def first(self) -> Sequence:
        """The sequence that runs next; it stays in the queue, which must not be empty."""
        while True:
            _, number, sequence = self._entries[0]
            if self._is_alive(number, sequence):
                return sequence
            heapq.heappop(self._entries)

    def _is_alive(self, number: int, sequence: Sequence) -> bool:
        return self._numbers.get(sequence) == number
