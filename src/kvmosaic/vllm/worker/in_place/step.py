"""One forward in which requests read documents in place: which rows read what, at which positions.

rows of the step        r0 r1 r2 (a plain request) │ r3 r4 (own tokens 6 and 7 of a request that reads a and b)
their positions         as vLLM says                 after those of the documents
what they read          vLLM's kernel                own tokens 0 to 5, a, b, and each other causally
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvmosaic.attention.interface import Piece, RowGroup
from kvmosaic.attention.reads import POOLS, Call, ReadPlan, plan_reads
from kvmosaic.attention.triton.replays import (
    MAX_PARTIAL_BYTES,
    MAX_ROWS,
    StepShape,
    room_for,
    room_in_walks,
    rooms_of,
    tails,
)
from kvmosaic.attention.triton.work import Numbers, WorkList, flat_work, pinned, work_of
from kvmosaic.layers.geometry import FULL, MaskSpec
from kvmosaic.vllm.operations import DocumentRead, InPlaceRequest

_CPU = torch.device("cpu")
_CHUNKS = POOLS.index("chunk_cache")
_NOWHERE = 1 << 62  # above every slot
_ROOM = 16
"""Blocks of own tokens that an answer may fill until its step is planned anew."""

Kinds = Mapping[MaskSpec, Sequence[tuple[int, int]]]
"""By mask, query heads per key head, and key heads, of its layers."""


@dataclass(frozen=True, slots=True)
class OwnRows:
    """The rows of one request in a forward: own tokens `first_index …`."""

    request: InPlaceRequest
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

    slots       [S] where the keys lie that its rows read; in this order they are one pool, "chunk_cache". Paged: [B],
                the blocks of these runs; a slot of "chunk_cache" counts along them
    rows        [T] the forward's rows that read in place
    positions   [T] theirs
    plans       by mask, the calls: rows count from 0 to T. Paged: its rows' own keys are in "chunk_cache", too
    works       paged: by mask, the work lists of its kinds of heads
    """

    slots: Tensor
    rows: Tensor
    positions: Tensor
    plans: Mapping[MaskSpec, ReadPlan]
    works: Mapping[MaskSpec, Mapping[tuple[int, int], WorkList]] = field(default_factory=dict)

    @classmethod
    def of(cls, requests: Sequence[OwnRows], block_size: int, rows: Tensor, masks: Iterable[MaskSpec]) -> InPlaceStep:
        """The reads of these requests on a CPU, where keys are read token by token before.

        Args:
            requests: the rows of the forward that read in place.
            block_size: tokens per block.
            rows: [T] which of the forward's they are.
            masks: those of the model's layers.
        """
        masks = tuple(masks)
        pool = _Pool(block_size)
        groups, _, positions = row_groups(requests, pool, by_position=masks != (FULL,), is_stored=False)
        plans = {mask: plan_reads(groups, mask, _CPU) for mask in masks}
        return cls(pool.slots(), rows, torch.tensor(positions), plans)


def row_groups(
    requests: Sequence[OwnRows], pool: _Pool, *, by_position: bool, is_stored: bool
) -> tuple[list[RowGroup], dict[int, int], list[int]]:
    """Groups of rows, of all requests one after the other; by first row of a group, its slot; and all positions.

    `by_position`: a mask of the model asks for positions of keys. `is_stored`: own keys are read from the pool as well.
    """
    groups: list[RowGroup] = []
    own_slots: dict[int, int] = {}
    positions: list[int] = []
    for own in requests:
        request = own.request
        seen = [(read, pool.place(read.blocks, read.start, read.num_tokens)) for read in request.reads]
        slot = pool.place_own(request.blocks, own.stop)
        borders = {read.first_reader for read in request.reads} | {index for index, _ in request.shifts}
        inside = sorted(border for border in borders if own.first_index < border < own.stop)
        for first, last in pairwise([own.first_index, *inside, own.stop]):
            position, reads_itself = own.position(first), is_stored and last == first + 1
            reads = (
                *_earlier(own, slot, first + reads_itself, by_position=by_position),
                *(_piece(read, at) for read, at in seen if read.first_reader <= first),
            )
            own_slots[len(positions)] = slot + first
            groups.append(RowGroup(len(positions), last - first, position, reads, reads_itself))
            positions += range(position, position + last - first)
    return groups, own_slots, positions


def _earlier(own: OwnRows, slot: int, stop: int, *, by_position: bool) -> Iterator[Piece]:
    """The own tokens before `stop`, stored from `slot` on; one piece where a mask does not ask for their positions."""
    shifts = (index for index, _ in own.request.shifts if 0 < index < stop)
    for first, last in pairwise([0, *(shifts if by_position else ()), stop]):
        if first < last:
            yield Piece("chunk_cache", slot + first, last - first, own.position(first))


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

    def place_own(self, blocks: tuple[int, ...], num_tokens: int) -> int:
        """Where the own tokens of a request begin."""
        return self.place(blocks, 0, num_tokens)


def wanted(requests: Sequence[OwnRows], block_size: int, num_rows: int) -> tuple[Numbers, Numbers]:
    """[num_rows] each: slots that the rows of requests write, ascending, and the number of each; nowhere beyond them.

    A block alone does not tell whose row it is: a request that is scheduled in the same step as one that begins alike
    has the block, too, that the other one writes.
    """
    slots = [
        own.request.blocks[index // block_size] * block_size + index % block_size
        for own in requests
        for index in range(own.first_index, own.stop)
    ]
    written = np.full(num_rows, _NOWHERE)
    written[: len(slots)] = slots
    order = written.argsort(kind="stable")
    return written[order], order


def rows_in(slots: Tensor, ascending: Tensor, numbers: Tensor) -> Tensor:
    """[T], all rows of a forward: first those of requests, by their numbers. Found on the device, without a wait.

    Args:
        slots: [T] that the forward writes; negative for padding.
        ascending: [R], of `wanted`.
        numbers: [R], likewise.
    """
    slots = slots.to(torch.int64)
    place = torch.searchsorted(ascending, slots).clamp(max=len(ascending) - 1)
    others = torch.arange(len(ascending), len(ascending) + len(slots), device=slots.device)
    return torch.where(ascending[place] == slots, numbers[place], others).argsort()


class PagedStep:
    """The whole numbers of a forward, and where they change in the next one.

    parts    slots of its rows, ascending, and the number of each  │ positions │ blocks of all runs │
             by mask: rows and distances of stacked queries │ work list of each kind of heads
    """

    def __init__(self, requests: Sequence[OwnRows], block_size: int, kinds: Kinds, num_rows: int) -> None:
        """Plans the rows of these requests, and others up to `num_rows`, which read nothing."""
        self.num_rows = num_rows
        self._requests, self._block_size, self._kinds = requests, block_size, kinds
        pool, is_full = _PagedPool(block_size), [*kinds] == [FULL]
        groups, own_slots, positions = row_groups(requests, pool, by_position=not is_full, is_stored=True)
        plans = {mask: _stored(plan_reads(groups, mask, _CPU), own_slots) for mask in kinds}
        self._moved = tuple(plan.is_moved for plan in plans.values())
        self._masked = {
            mask: plan.calls for mask, plan in plans.items() if any(call.mask is not None for call in plan.calls)
        }
        self._own = pool.own
        self._num_left = room_in_walks(plans[FULL]) if is_full and all(map(_is_answer, requests)) else 0
        self._grows: list[tuple[int, Numbers]] = []
        self.parts = [*wanted(requests, block_size, num_rows), np.zeros(num_rows, np.int64), np.array(pool.blocks)]
        self.parts[2][: len(positions)] = positions
        rooms = [num_rows, num_rows, num_rows, room_for(len(pool.blocks))]
        self._num_partials = 0
        for mask, plan in plans.items():
            self.parts += [np.array(plan.row_numbers), plan.distances.numpy()]
            rooms += [room_for(len(plan.row_numbers))] * 2
            for kind in kinds[mask]:
                listed = flat_work(replace(plan, num_rows=num_rows), *kind)
                if self._num_left:
                    ends = [slot + own.stop for (slot, _), own in zip(self._own, requests, strict=True)]
                    self._grows.append((len(self.parts), tails(listed[0], _CHUNKS, ends)))
                self.parts += listed
                rooms += rooms_of(listed)
                self._num_partials = max(self._num_partials, rooms[-2])
        self._rooms = tuple(rooms)

    def shape(self, addresses: tuple[int, ...], row_bytes: int) -> StepShape | None:
        """What a graph of it is captured for; None if it has masks, many rows, or partial results of much memory."""
        if self._masked or self.num_rows > MAX_ROWS or self._num_partials * row_bytes > MAX_PARTIAL_BYTES:
            return None
        return StepShape(self.num_rows, self._moved, self._rooms, addresses)

    def grow(self, requests: Sequence[OwnRows], num_rows: int) -> bool:
        """Goes on to the next step; False if that is not these answers with a token more each, or begins a walk."""
        before, size, table = self._requests, self._block_size, self.parts[3]
        if not self._num_left or (len(requests), num_rows) != (len(before), self.num_rows):
            return False
        if not all(map(_is_next, before, requests)):
            return False
        at = [own.first_index // size for own in requests]
        if any(index >= num_blocks for index, (_, num_blocks) in zip(at, self._own, strict=True)):
            return False
        for own, index, (slot, _) in zip(requests, at, self._own, strict=True):
            table[slot // size + index] = own.request.blocks[index]
        self._num_left -= 1
        self._requests = requests
        self.parts[:2] = wanted(requests, size, num_rows)
        self.parts[2][: len(requests)] += 1
        for part, places in self._grows:
            self.parts[part][places] += 1
        return True

    def step(self, parts: Sequence[Tensor], rows: Tensor) -> InPlaceStep:
        """The step whose numbers are in these parts, on a device, and which are rows [T] of its forward."""
        _, _, positions, table, *rest = parts
        left = iter(rest)
        everything = (Call(0, 0, "chunk_cache", 0, len(table) * self._block_size),)
        plans, works = {}, {}
        for (mask, kinds), is_moved in zip(self._kinds.items(), self._moved, strict=True):
            stacked, distances = next(left), next(left)
            works[mask] = {kind: work_of(left) for kind in kinds}
            calls = tuple(_on(call, table.device) for call in self._masked.get(mask, everything))
            plans[mask] = ReadPlan(calls, stacked, distances, self.num_rows, is_moved, False, ())
        return InPlaceStep(table, rows, positions, plans, works)


class _PagedPool(_Pool):
    """Runs of slots in whole blocks, each once: one that begins inside a block begins inside one of the table, too."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.blocks: list[int] = []
        """Of all runs."""
        self.own: list[tuple[int, int]] = []
        """Of each request, where its own tokens begin, and for how many blocks of them there is room."""

    def place(self, blocks: tuple[int, ...], start: int, num_tokens: int) -> int:
        """Where a run begins in the pool."""
        run, size = (blocks, start, num_tokens), self._block_size
        if run not in self._runs:
            self._runs[run] = len(self.blocks) * size + start % size
            self.blocks += blocks[start // size : -(-(start + num_tokens) // size)]
        return self._runs[run]

    def place_own(self, blocks: tuple[int, ...], num_tokens: int) -> int:
        """Where the own tokens of a request begin, with room for others after them."""
        slot, kept = len(self.blocks) * self._block_size, blocks[: -(-num_tokens // self._block_size)]
        self.blocks += [*kept, *[0] * _ROOM]
        self.own.append((slot, len(kept) + _ROOM))
        return slot


def _is_answer(own: OwnRows) -> bool:
    """Whether it is one row, which sees all that its request reads."""
    return own.num_rows == 1 and all(read.first_reader <= own.first_index for read in own.request.reads)


def _is_next(before: OwnRows, own: OwnRows) -> bool:
    """Whether a row is the one after another one, of the same request."""
    was, now, index = before.request, own.request, own.first_index
    return (
        own.num_rows == 1
        and index == before.stop
        and own.position(index) == before.position(index - 1) + 1
        and now.blocks[: len(was.blocks)] == was.blocks
        and now.reads == was.reads
    )


def _stored(plan: ReadPlan, own_slots: Mapping[int, int]) -> ReadPlan:
    """A plan that reads the rows' own keys from the cache, where they are stored by then."""
    calls = (
        call if call.pool is not None else replace(call, pool="chunk_cache", first_slot=own_slots[call.first_slot])
        for call in plan.calls
    )
    return replace(plan, calls=tuple(calls))


def _on(call: Call, device: torch.device) -> Call:
    return call if call.mask is None else replace(call, mask=pinned(call.mask, device).to(device, non_blocking=True))
