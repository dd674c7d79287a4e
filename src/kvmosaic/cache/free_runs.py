"""Free blocks, kept as runs of neighbours."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import pairwise


class FreeRuns:
    """The free blocks of a pool: which runs of neighbours there are, and which one fits.

        block     0 1 2 3 4 5 6 7 8 9
        free      . . x x x . x . x x        x = free
        runs      [2, 3) long 3, [6] long 1, [8, 9] long 2

    Invariants: runs do not overlap and never touch (neighbours are merged at once).

    N blocks have at most sqrt(2 N) different run lengths, so the sorted list of lengths stays short (1,414 for a
    million blocks) and every call costs O(log N) plus one small insertion.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_free = 0
        self._length: dict[int, int] = {}
        """First block of a run -> its length."""
        self._first: dict[int, int] = {}
        """One past the last block of a run -> its first block."""
        self._firsts: dict[int, dict[int, None]] = {}
        """Length -> first blocks of the runs that long (a dict as an ordered set)."""
        self._lengths: list[int] = []
        """The lengths that occur, sorted."""
        self.put(0, num_blocks)

    def length_at(self, first: int) -> int:
        """Length of the run that starts at this block; 0 if none does."""
        return self._length.get(first, 0)

    @property
    def longest(self) -> int:
        """Length of the longest run."""
        return self._lengths[-1] if self._lengths else 0

    def put(self, first: int, length: int) -> None:
        """Adds free blocks and merges them with their neighbours; a length of 0 does nothing."""
        if not length:
            return
        self.num_free += length
        end = first + length
        before = self._first.get(first)
        if before is not None:
            self._remove(before, first - before)
            first = before
        behind = self._length.get(end)
        if behind is not None:
            self._remove(end, behind)
            end += behind
        self._insert(first, end - first)

    def take(self, first: int, count: int, offset: int = 0) -> int:
        """Takes `count` blocks out of the run that starts at `first`, `offset` blocks in; returns the first of them."""
        length = self._length[first]
        assert count > 0 and offset >= 0 and offset + count <= length, "taken blocks lie inside the run"
        self._remove(first, length)
        if offset:
            self._insert(first, offset)
        if offset + count < length:
            self._insert(first + offset + count, length - offset - count)
        self.num_free -= count
        return first + offset

    def fitting(self, count: int) -> int | None:
        """The first block of the shortest run that holds `count`; None when all are shorter."""
        place = bisect_left(self._lengths, count)
        return next(iter(self._firsts[self._lengths[place]])) if place < len(self._lengths) else None

    def runs(self) -> list[tuple[int, int]]:
        """All runs as (first block, length), in order; for tests and reports (it sorts)."""
        return sorted(self._length.items())

    def check_invariants(self) -> None:
        """Checks that the four views of the runs agree and that no two runs touch."""
        runs = self.runs()
        assert all(length > 0 for _, length in runs)
        assert sum(length for _, length in runs) == self.num_free
        assert all(first + length < behind for (first, length), (behind, _) in pairwise(runs))
        assert self._first == {first + length: first for first, length in runs}
        assert self._lengths == sorted(self._firsts)
        listed = sorted((first, length) for length, firsts in self._firsts.items() for first in firsts)
        assert listed == runs and all(self._firsts.values())

    def _insert(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length] = first
        firsts = self._firsts.get(length)
        if firsts is None:
            self._firsts[length] = {first: None}
            insort(self._lengths, length)
        else:
            firsts[first] = None

    def _remove(self, first: int, length: int) -> None:
        del self._length[first]
        del self._first[first + length]
        firsts = self._firsts[length]
        del firsts[first]
        if not firsts:
            del self._firsts[length]
            del self._lengths[bisect_left(self._lengths, length)]
