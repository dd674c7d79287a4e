"""Free blocks as runs of neighbours."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from itertools import pairwise

_NONE = -1


class FreeRuns:
    """The free blocks of a pool, as runs of neighbours with a best-fit search.

        block          0 1 2 3 4 5 6 7 8 9
        free           . . x x x . x . x x        x = free
        runs           [2, 3, 4], [6], [8, 9]
        from a first   0 0 3 0 0 0 1 0 2 0        length of the run that starts here
        to a last      0 0 0 0 3 0 1 0 0 2        length of the run that ends here
        by length      1: 6      2: 8      3: 2   runs of equal length are linked, oldest first

    Invariants: runs do not overlap and never touch (neighbours are merged at once).

    N blocks have at most sqrt(2 N) different run lengths, so the sorted list of lengths stays short (4,472 for ten
    million blocks) and every call costs O(log N) plus one small insertion. It takes 16 bytes per block in flat arrays,
    independent of the number of runs: nothing grows, and the garbage collector traverses nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_free = 0
        self._num_blocks = num_blocks
        self._starting = array("i", [0]) * num_blocks
        self._ending = array("i", [0]) * num_blocks
        self._next = array("i", [_NONE]) * num_blocks
        self._previous = array("i", [_NONE]) * num_blocks
        """First block of a run -> first block of the previous or next run in the linked list of its length."""
        self._oldest: dict[int, int] = {}
        self._newest: dict[int, int] = {}
        """Length -> first block of the run at the head or the tail of its list."""
        self._lengths: list[int] = []
        """The lengths that occur, sorted."""
        self.put(0, num_blocks)

    def length_at(self, first: int) -> int:
        """Length of the run that starts at this block; 0 if none does."""
        return self._starting[first] if first < self._num_blocks else 0

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
        if first and (before := self._ending[first - 1]):
            first -= before
            self._remove(first, before)
        if behind := self.length_at(end):
            self._remove(end, behind)
            end += behind
        self._insert(first, end - first)

    def take(self, first: int, count: int, offset: int = 0) -> int:
        """Takes `count` blocks out of the run that starts at `first`, `offset` blocks in; returns the first of them."""
        length = self._starting[first]
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
        return self._oldest[self._lengths[place]] if place < len(self._lengths) else None

    def runs(self) -> list[tuple[int, int]]:
        """All runs as (first block, length), in order; for tests and reports (it sorts)."""
        found = []
        for length, first in self._oldest.items():
            while first != _NONE:
                found.append((first, length))
                first = self._next[first]
        return sorted(found)

    def check_invariants(self) -> None:
        """Checks that the views of the runs agree and that no two runs touch."""
        runs = self.runs()
        assert all(length > 0 for _, length in runs)
        assert sum(length for _, length in runs) == self.num_free
        assert all(first + length < behind for (first, length), (behind, _) in pairwise(runs))
        assert runs == [(first, length) for first, length in enumerate(self._starting) if length]
        assert runs == [(last + 1 - length, length) for last, length in enumerate(self._ending) if length]
        assert self._lengths == sorted(self._oldest) == sorted(self._newest)
        for length, first in self._oldest.items():
            assert self._previous[first] == _NONE
            while (behind := self._next[first]) != _NONE:
                assert self._previous[behind] == first
                first = behind
            assert self._newest[length] == first

    def _insert(self, first: int, length: int) -> None:
        self._starting[first] = self._ending[first + length - 1] = length
        before = self._newest.get(length, _NONE)
        if before == _NONE:
            self._oldest[length] = first
            insort(self._lengths, length)
        else:
            self._next[before] = first
        self._newest[length] = first
        self._previous[first] = before
        self._next[first] = _NONE

    def _remove(self, first: int, length: int) -> None:
        self._starting[first] = self._ending[first + length - 1] = 0
        before, behind = self._previous[first], self._next[first]
        if before == behind == _NONE:
            del self._oldest[length], self._newest[length]
            del self._lengths[bisect_left(self._lengths, length)]
            return
        if before == _NONE:
            self._oldest[length] = behind
        else:
            self._next[before] = behind
        if behind == _NONE:
            self._newest[length] = before
        else:
            self._previous[behind] = before
