"""The block pool: block ids, ref counts, and the free blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NewType

from kvmosaic.cache.free_runs import FreeRuns
from kvmosaic.errors import InvalidConfig, OutOfBlocks

BlockId = NewType("BlockId", int)

_MAX_BLOCKS = 2**31 - 1


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

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return count <= self._free.num_free

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
