"""The block pool: block ids, ref counts, and the free blocks."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NewType

from kvmosaic.errors import InvalidConfig, OutOfBlocks

_NONE = -1
BlockId = NewType("BlockId", int)
_MAX_BLOCKS = 2**31 - 1


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


class BlockPool:
    """Pool of blocks of `block_size` token slots each, with a ref count per block. No tensors here.

        block        0   1   2   3   4   5   6   7
        references   1   2   2   0   0   0   1   0      0: free; 2 or more: shared, copied before it is written
                     └ system ┘  └─ free ─┘      └ free

    Invariants:
        a block is free exactly when it has no reference
        num_free + num_used == num_blocks
    Always safe: `allocate(0)`, `release([])`, allocating more than is free (raises, changes nothing).

    Neighbouring blocks can be read as one piece without a gather, so runs are preferred: first the blocks right after
    `after`, then the shortest free run that fits, then as few runs as possible. A growing allocation starts in the
    middle of the longest free run instead, so that concurrently decoding sequences do not interleave.
    """

    def __init__(self, name: str, num_blocks: int, block_size: int) -> None:
        if not 0 <= num_blocks <= _MAX_BLOCKS:
            raise InvalidConfig(f"the pool {name!r} must have between 0 and {_MAX_BLOCKS} blocks, got {num_blocks}")
        if block_size < 1:
            raise InvalidConfig(f"block_size must be at least 1, got {block_size}")
        self.name = name
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = array("i", [0]) * num_blocks
        self._free = FreeRuns(num_blocks)
        self._num_shared = 0
        self._num_references = 0

    @property
    def num_free(self) -> int:
        """Blocks without a reference."""
        return self._free.num_free

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self._free.num_free

    @property
    def num_shared(self) -> int:
        """Blocks with at least two references."""
        return self._num_shared

    @property
    def num_references(self) -> int:
        """Sum of all ref counts."""
        return self._num_references

    @property
    def references(self) -> array[int]:
        """Ref count of every block, by block id; read only."""
        return self._references

    def reference_count(self, block_id: BlockId) -> int:
        """Ref count of one block; 0 when it is free."""
        return self._references[block_id]

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int, *, after: BlockId | None = None, grows: bool | None = None) -> list[BlockId]:
        """Allocates free blocks, each with ref count 1; all of them or none.

        Args:
            count: how many.
            after: take the blocks right after this one if they are free.
            grows: more will be allocated later, so leave free blocks after them; None: when `count` is 1.

        Raises:
            OutOfBlocks: fewer than `count` are free; nothing has changed.
        """
        assert count >= 0
        if count > self.num_free:
            raise OutOfBlocks(
                f"the pool {self.name!r} cannot give {count} blocks: of {self.num_blocks} {self.num_free} are free; "
                "wait until running requests end, or give the pool more memory"
            )
        block_ids: list[int] = []
        behind = self._free.length_at(after + 1) if after is not None and count else 0
        if behind:
            assert after is not None
            self._take(after + 1, min(behind, count), block_ids)
        if count == 1 if grows is None else grows:
            self._take_roomy(count - len(block_ids), block_ids)
        while missing := count - len(block_ids):
            first = self._free.fitting(missing)
            if first is None:
                missing = self._free.longest
                first = self._free.fitting(missing)
            assert first is not None
            self._take(first, missing, block_ids)
        for block_id in block_ids:
            self._references[block_id] = 1
        self._num_references += count
        return [BlockId(block_id) for block_id in block_ids]

    def retain(self, block_ids: Iterable[BlockId]) -> None:
        """Adds a reference to each block."""
        references = self._references
        for block_id in block_ids:
            count = references[block_id]
            assert count > 0, f"block {block_id} of the pool {self.name!r} is free and cannot be retained"
            references[block_id] = count + 1
            self._num_references += 1
            if count == 1:
                self._num_shared += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Removes a reference from each block; blocks with ref count 0 are free again."""
        references = self._references
        first = length = 0
        for block_id in block_ids:
            count = references[block_id]
            assert count > 0, f"block {block_id} of the pool {self.name!r} is released more often than referenced"
            references[block_id] = count - 1
            if count == 2:
                self._num_shared -= 1
            elif count == 1:
                if block_id == first + length:
                    length += 1
                else:
                    self._free.put(first, length)
                    first, length = block_id, 1
        self._free.put(first, length)
        self._num_references -= len(block_ids)

    def check_invariants(self) -> None:
        """Checks the ref counts against each other (slow: reads every block)."""
        self._free.check_invariants()
        free = {first + i for first, length in self._free.runs() for i in range(length)}
        assert free == {block_id for block_id, count in enumerate(self._references) if count == 0}
        assert all(count >= 0 for count in self._references)
        assert self._num_shared == sum(count > 1 for count in self._references)
        assert self._num_references == sum(self._references)

    def _take(self, first: int, count: int, block_ids: list[int], offset: int = 0) -> None:
        taken = self._free.take(first, count, offset)
        block_ids.extend(range(taken, taken + count))

    def _take_roomy(self, count: int, block_ids: list[int]) -> None:
        """Takes one run from the middle of the longest free run: half of the gap remains for its neighbour."""
        length = self._free.longest
        if not 0 < count <= length:
            return
        first = self._free.fitting(length)
        assert first is not None
        self._take(first, count, block_ids, offset=(length - count) // 2 if first else 0)
