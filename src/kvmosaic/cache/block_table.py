"""The block table: the blocks that hold the tokens of one span; and saved states, of layers that keep no tokens."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, cast

from kvmosaic.cache.block_pool import BlockId, BlockPool

_ONE_RUN = (0,)
"""Run starts of most tables."""


class BlockCopy(NamedTuple):
    """A whole block to copy, to be carried out before anything is written to the target."""

    source: BlockId
    target: BlockId


class BlockRun(NamedTuple):
    """A run of tokens in neighbouring slots: one strided view of the pool's tensor."""

    first_slot: int
    num_tokens: int


class BlockTable:
    """The blocks that hold a growing run of tokens, in order; it owns one reference to each.

        block_size 4, 10 tokens          token    0 1 2 3 | 4 5 6 7 | 8 9 . .
        block_ids [7, 8, 2]              slot     28 … 31 | 32 … 35 | 8 9 . .
        runs      (28, 8 tokens), (8, 2 tokens)           blocks 7 and 8 are neighbours

    Only slots after the last token are ever written. So a block needs a copy in one case only: it is the last one,
    partly filled and shared. `append` checks that before every write.

    Invariants:
        len(block_ids) == ceil(num_tokens / block_size)
        every block has at least this table's reference, until `release`
    Always safe: `append(0)`; an `append` that raises changes nothing.
    """

    __slots__ = ("_block_ids", "_finished_runs", "_run_starts", "grows", "is_released", "num_tokens", "pool")

    def __init__(self, pool: BlockPool, *, grows: bool = False) -> None:
        """An empty table; `grows` leaves free blocks after its own (see `BlockPool.allocate`)."""
        self.pool = pool
        self.grows = grows
        self.num_tokens = 0
        self.is_released = False
        self._block_ids = _no_blocks()
        self._run_starts: tuple[int, ...] = ()
        """Indexes into block_ids where a run of neighbours begins."""
        self._finished_runs: tuple[BlockRun, ...] = ()
        """All runs but the last, which alone can still grow."""

    @classmethod
    def adopt(
        cls, pool: BlockPool, block_ids: Sequence[BlockId], num_tokens: int, *, grows: bool = False
    ) -> BlockTable:
        """A table over blocks that were retained for it; it takes over those references."""
        assert len(block_ids) == pool.blocks_for(num_tokens)
        table = cls(pool, grows=grows)
        table._add_blocks(block_ids)
        table.num_tokens = num_tokens
        return table

    @property
    def block_ids(self) -> Sequence[BlockId]:
        """The blocks in token order; read only."""
        return self._block_ids

    def blocks_to_append(self, count: int) -> int:
        """Blocks that `append(count)` would allocate, a copied one included."""
        if not count:
            return 0
        return self.pool.blocks_for(self.num_tokens + count) - len(self._block_ids) + self._last_is_shared()

    def append(self, count: int) -> list[BlockCopy]:
        """Allocates slots for `count` more tokens; returns the copies to carry out before they are written.

        Raises:
            OutOfBlocks: the pool has too few free blocks; the table is unchanged.
        """
        assert not self.is_released and count >= 0
        copies: list[BlockCopy] = []
        if needed := self.blocks_to_append(count):
            is_copied = self._last_is_shared()
            last = len(self._block_ids) - is_copied - 1
            after = self._block_ids[last] if last >= 0 else None
            new = self.pool.allocate(needed, after=after, grows=self.grows)
            if is_copied:
                source = self._drop_last_block()
                copies.append(BlockCopy(source, new[0]))
                self.pool.release([source])
            self._add_blocks(new)
        self.num_tokens += count
        return copies

    def cut(self, first: int, count: int) -> None:
        """Frees `count` whole blocks from block number `first` on; the tokens after them move up.

        A rolling window frees its oldest tokens this way. Costs O(blocks of the table).
        """
        assert not self.is_released and first >= 0 and count > 0
        assert (first + count) * self.pool.block_size <= self.num_tokens, "what is written next stays in its block"
        gone = self._block_ids[first : first + count]
        rest = [*self._block_ids[:first], *self._block_ids[first + count :]]
        self._block_ids, self._run_starts, self._finished_runs = _no_blocks(), (), ()
        self._add_blocks(rest)
        self.num_tokens -= count * self.pool.block_size
        self.pool.release(gone)

    def fork(self) -> BlockTable:
        """A second table over the same blocks; the first to append copies a partly filled last block."""
        assert not self.is_released
        self.pool.retain(self._block_ids)
        other = BlockTable(self.pool, grows=self.grows)
        other.num_tokens = self.num_tokens
        other._block_ids = self._block_ids[:]
        other._run_starts = self._run_starts
        other._finished_runs = self._finished_runs
        return other

    def release(self) -> None:
        """Releases all references; a second call does nothing."""
        if self.is_released:
            return
        self.is_released = True
        self.pool.release(self._block_ids)
        self._block_ids, self._run_starts, self._finished_runs, self.num_tokens = _no_blocks(), (), (), 0

    def slots(self, first: int, count: int) -> list[int]:
        """The slots of `count` tokens from token index `first`: block_id * block_size + offset each."""
        assert first >= 0 and first + count <= self.num_tokens, "slots lie inside the table"
        size = self.pool.block_size
        slots: list[int] = []
        while count > 0:
            index, offset = divmod(first, size)
            here = min(size - offset, count)
            slot = self._block_ids[index] * size + offset
            slots.extend(range(slot, slot + here))
            first, count = first + here, count - here
        return slots

    def runs(self, num_tokens: int | None = None) -> tuple[BlockRun, ...]:
        """The first `num_tokens` tokens (all by default) as runs of neighbouring slots.

        Costs O(number of runs), independent of the number of blocks: the table updates its runs as it grows.
        """
        count = self.num_tokens if num_tokens is None else num_tokens
        assert 0 <= count <= self.num_tokens
        if count == 0:
            return ()
        size = self.pool.block_size
        last = bisect_right(self._run_starts, (count - 1) // size) - 1
        start = self._run_starts[last]
        run = BlockRun(self._block_ids[start] * size, count - start * size)
        return (*self._finished_runs[:last], run) if last else (run,)

    def runs_between(self, first: int, last: int) -> tuple[BlockRun, ...]:
        """The tokens from index `first` up to, not including, `last`, as runs of neighbouring slots."""
        assert 0 <= first <= last
        parts, skipped = [], first
        for run in self.runs(last):
            hidden = min(skipped, run.num_tokens)
            skipped -= hidden
            if hidden < run.num_tokens:
                parts.append(BlockRun(run.first_slot + hidden, run.num_tokens - hidden))
        return tuple(parts)

    def check_invariants(self) -> None:
        """Checks blocks, ref counts and runs against each other."""
        assert len(self._block_ids) == self.pool.blocks_for(self.num_tokens)
        assert all(self.pool.reference_count(block_id) > 0 for block_id in self._block_ids)
        starts = [i for i, b in enumerate(self._block_ids) if i == 0 or self._block_ids[i - 1] + 1 != b]
        assert tuple(starts) == self._run_starts
        spelled = [slot for run in self.runs() for slot in range(run.first_slot, run.first_slot + run.num_tokens)]
        assert spelled == self.slots(0, self.num_tokens)

    def _last_is_shared(self) -> bool:
        is_partly_filled = self.num_tokens % self.pool.block_size != 0
        return is_partly_filled and self.pool.reference_count(self._block_ids[-1]) > 1

    def _add_blocks(self, block_ids: Sequence[BlockId]) -> None:
        blocks, size = self._block_ids, self.pool.block_size
        new: list[int] = []
        last = blocks[-1] if blocks else None
        for index, block_id in enumerate(block_ids, len(blocks)):
            if last is None or last + 1 != block_id:
                new.append(index)
            last = block_id
        blocks.extend(block_ids)
        if new:
            starts = [*self._run_starts[-1:], *new]
            finished = (BlockRun(blocks[start] * size, (end - start) * size) for start, end in pairwise(starts))
            self._finished_runs += tuple(finished)
            self._run_starts = (*self._run_starts, *new) if starts != [0] else _ONE_RUN

    def _drop_last_block(self) -> BlockId:
        if self._run_starts[-1] == len(self._block_ids) - 1:
            self._run_starts = self._run_starts[:-1]
            self._finished_runs = self._finished_runs[: max(len(self._run_starts) - 1, 0)]
        return self._block_ids.pop()


def _no_blocks() -> MutableSequence[BlockId]:
    """An array with four bytes per block: a cache has millions."""
    return cast(MutableSequence[BlockId], array("i"))


class SavedState:
    """The state after some token of a span. The step that computes the token fills it, and nothing changes it again.

    It lives as long as something refers to it: a chunk, a prefix entry, a running sequence.
    """

    __slots__ = ("__weakref__", "has_map", "is_lost", "is_passing", "rest", "value")

    def __init__(self, has_map: bool = False, rest: SavedState | None = None, is_passing: bool = False) -> None:
        self.has_map = has_map
        """Whether it also holds what its span, a chunk, does to the state before it."""
        self.rest = rest
        """The same of its tokens after the first k, where those may be repaired."""
        self.is_passing = is_passing
        """Whether only the step that computes it needs it."""
        self.is_lost = False
        """Whether that step failed."""
        self.value: Any = None
        """What the runner keeps here."""


@dataclass(frozen=True, slots=True)
class StateProgress:
    """From where tokens of a step continue, and where their states go."""

    before: SavedState | None
    """After the span's tokens before them; None: they are its first, and begin after the spans that it sees."""
    saves: tuple[tuple[int, SavedState], ...]
    """The state after so many of them; the last one is after all of them."""

    @property
    def is_lost(self) -> bool:
        """Whether they continue from a state that has not been computed, since its step failed."""
        return self.before is not None and self.before.is_lost

    @property
    def last(self) -> SavedState:
        """The state after all of them."""
        return self.saves[-1][1]
