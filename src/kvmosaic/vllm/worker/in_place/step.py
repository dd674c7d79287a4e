"""One forward in which requests read documents in place: which rows read what, at which positions.

rows of the step        r0 r1 r2 (a plain request) │ r3 r4 (own tokens 6 and 7 of a request that reads a and b)
their positions         as vLLM says                 after those of the documents
what they read          vLLM's kernel                own tokens 0 to 5, a, b, and each other causally
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from kvmosaic.attention.interface import Piece, RowGroup
from kvmosaic.attention.reads import Call, ReadPlan, plan_reads
from kvmosaic.layers.geometry import FULL, MaskSpec
from kvmosaic.vllm.operations import DocumentRead, InPlaceRequest

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows of one request in a forward: own tokens `first_index …`."""

    request: InPlaceRequest
    first_row: int
    num_rows: int
    first_index: int

    @property
    def stop(self) -> int:
        """Own tokens after this forward."""
        return self.first_index + self.num_rows

    def position(self, index: int) -> int:
        """Position of an own token."""
        number = bisect_right(self.request.shifts, index, key=lambda shift: shift[0])
        return index + (self.request.shifts[number - 1][1] if number else 0)


@dataclass(frozen=True, slots=True)
class InPlaceStep:
    """Reads of one forward, for all layers.

    slots       [S] where the keys lie that its rows read; in this order they are one pool, "chunk_cache". Paged: none
    table       paged: [B] int32, the blocks of these runs; a slot of "chunk_cache" counts along them
    rows        [T] the forward's rows that read in place
    positions   [T] theirs
    plans       by mask, the calls: rows count from 0 to T. Paged: its rows' own keys are in "chunk_cache", too
    """

    slots: Tensor
    table: Tensor
    rows: Tensor
    positions: Tensor
    plans: Mapping[MaskSpec, ReadPlan]

    @classmethod
    def of(
        cls,
        requests: Sequence[OwnRows],
        block_size: int,
        device: torch.device = _CPU,
        *,
        masks: Iterable[MaskSpec] = (FULL,),
        is_paged: bool = False,
    ) -> InPlaceStep | None:
        """The reads of these requests; None if no row of them reads a document or is shifted.

        Args:
            requests: the rows of the forward that read in place.
            block_size: tokens per block.
            device: of all tensors.
            masks: those of the model's layers.
            is_paged: keys are read from the cache by blocks, those of the forward's own rows as well, instead of
                being read token by token before.
        """
        masks = tuple(masks)
        by_position = masks != (FULL,)
        pool = _PagedPool(block_size) if is_paged else _Pool(block_size)
        own_slots: dict[int, int] = {}
        groups: list[RowGroup] = []
        rows: list[int] = []
        positions: list[int] = []
        for own in requests:
            request = own.request
            seen = [(read, pool.place(read.blocks, read.start, read.num_tokens)) for read in request.reads]
            slot = pool.place(request.blocks, 0, own.stop)
            borders = {read.first_reader for read in request.reads} | {index for index, _ in request.shifts}
            inside = sorted(border for border in borders if own.first_index < border < own.stop)
            for first, last in pairwise([own.first_index, *inside, own.stop]):
                position = own.position(first)
                reads = (
                    *_earlier(own, slot, first, by_position=by_position),
                    *(_piece(read, at) for read, at in seen if read.first_reader <= first),
                )
                own_slots[len(rows)] = slot + first
                groups.append(RowGroup(len(rows), last - first, position, reads))
                start = own.first_row + first - own.first_index
                rows += range(start, start + last - first)
                positions += range(position, position + last - first)
        if not groups:
            return None
        plans = {mask: plan_reads(groups, mask, device) for mask in masks}
        if is_paged:
            plans = {
                mask: replace(plan, calls=tuple(_stored(call, own_slots) for call in plan.calls))
                for mask, plan in plans.items()
            }
        return cls(
            slots=pool.slots().to(device),
            table=pool.table().to(device),
            rows=torch.tensor(rows, device=device),
            positions=torch.tensor(positions, device=device),
            plans=plans,
        )


def _earlier(own: OwnRows, slot: int, stop: int, *, by_position: bool) -> Iterator[Piece]:
    """The own tokens before `stop`, stored from `slot` on; one piece where a mask does not ask for their positions."""
    shifts = (index for index, _ in own.request.shifts if 0 < index < stop)
    for first, last in pairwise([0, *(shifts if by_position else ()), stop]):
        if first < last:
            yield Piece("chunk_cache", slot + first, last - first, own.position(first))


def _stored(call: Call, own_slots: Mapping[int, int]) -> Call:
    """A call that reads the rows' own keys from the cache, where they are stored by then."""
    if call.pool is not None:
        return call
    return replace(call, pool="chunk_cache", first_slot=own_slots[call.first_slot])


def _piece(read: DocumentRead, slot: int) -> Piece:
    return Piece("chunk_cache", slot, read.num_tokens, read.position + read.distance, read.distance)


class _Pool:
    """Runs of slots, each once."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._runs: dict[tuple[tuple[int, ...], int, int], int] = {}
        self._num_slots = 0

    def place(self, blocks: tuple[int, ...], start: int, num_tokens: int) -> int:
        """Where a run begins in the pool."""
        run = (blocks, start, num_tokens)
        if run not in self._runs:
            self._runs[run] = self._num_slots
            self._num_slots += num_tokens
        return self._runs[run]

    def slots(self) -> Tensor:
        """[S], the slots of all runs."""
        size = self._block_size
        parts = []
        for blocks, start, num_tokens in self._runs:
            index = torch.arange(start, start + num_tokens)
            parts.append(torch.tensor(blocks)[index // size] * size + index % size)
        return torch.cat(parts)

    def table(self) -> Tensor:
        """See `_PagedPool.table`."""
        return torch.empty(0, dtype=torch.int32)


class _PagedPool(_Pool):
    """Runs of slots in whole blocks, each once: one that begins inside a block begins inside one of the table, too."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self._table: list[int] = []

    def place(self, blocks: tuple[int, ...], start: int, num_tokens: int) -> int:
        """Where a run begins in the pool."""
        run, size = (blocks, start, num_tokens), self._block_size
        if run not in self._runs:
            self._runs[run] = len(self._table) * size + start % size
            self._table += blocks[start // size : -(-(start + num_tokens) // size)]
        return self._runs[run]

    def slots(self) -> Tensor:
        """None: they are read by the table."""
        return torch.empty(0, dtype=torch.int64)

    def table(self) -> Tensor:
        """[B] int32, the blocks of all runs."""
        return torch.tensor(self._table, dtype=torch.int32)


def rows_of(requests: Sequence[InPlaceRequest], slots: Tensor, block_size: int) -> list[OwnRows]:
    """Finds the rows of requests by the slot of their first token; those of a request are adjacent.

    A block alone does not tell whose row it is: a request that is scheduled in the same step as one that begins alike
    has the block, too, that the other one writes.

    Args:
        requests: requests of the step; of another forward than the step's, none is found.
        slots: [T] written slots, negative for padding; on the host.
        block_size: tokens per block.
    """
    rows = {slot: row for row, slot in enumerate(slots.tolist())}
    found = []
    for request in requests:
        first, last = request.num_computed, request.num_computed + request.num_scheduled - 1
        row = rows.get(_slot(request, first, block_size))
        if row is not None:
            assert rows.get(_slot(request, last, block_size)) == row + last - first, "rows of a request are adjacent"
            found.append(OwnRows(request, row, request.num_scheduled, first))
    return found


def _slot(request: InPlaceRequest, index: int, block_size: int) -> int:
    return request.blocks[index // block_size] * block_size + index % block_size
