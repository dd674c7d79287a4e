"""Reads: the keys that the rows of a step read, as plain data.

A step computes groups of rows. Every group sees whole runs of stored keys (each moved by its own distance), and its
own rows causally. Windows and chunked masks only remove keys, so one list of groups serves every layer;
`plan_reads` builds the plan for one kind of mask from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvmosaic.attention.interface import Piece, PoolName, RowGroup
from kvmosaic.layers.geometry import MaskSpec

_NOWHERE = -(1 << 62)
"""Before every position."""
POOLS: tuple[PoolName | None, ...] = (None, "request", "chunk_cache")
"""All pools that calls may read, in the numbering of the kernels; None: the step's own rows."""


@dataclass(frozen=True, slots=True)
class Call:
    """One attention call: a slice of stacked queries against one run of keys."""

    first: int
    last: int
    """The stacked queries [first, last)."""
    pool: PoolName | None
    """None: the keys of the step's own rows."""
    first_slot: int
    num_tokens: int
    causal: bool = False
    mask: Bool[Tensor, "R S"] | None = None
    """[last - first, num_tokens] bool; None: everything is seen."""


Reader = tuple[int, int, int, bool, int]
"""Rows of a group in a call: their number, position of the first, position of its first key, whether that follows, and
the number of the run among all that they read."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All calls of one step for the layers with one kind of mask.

    rows: [R] the row of every stacked query; queries that share a run are adjacent, so it is read once
    distances: [R] how far the keys are moved for it; on the CPU, where tables of rotations are looked up
    """

    calls: tuple[Call, ...]
    rows: Int[Tensor, " R"]
    distances: Int[Tensor, " R"]
    num_rows: int
    is_moved: bool
    is_single: bool
    """Every row has exactly one call, in order: nothing to stack, nothing to merge."""
    row_numbers: tuple[int, ...]
    """Copy of `rows` on the host: reading them back from a GPU would synchronize."""
    readers: tuple[Reader, ...] = ()
    """Readers of the stacked queries, in order."""

    def positions(self) -> tuple[Int[Tensor, " R"], Int[Tensor, " R"]]:
        """[R], position of each stacked query's row; and [R], position of the first key of its call for that row."""
        rows: list[int] = []
        keys: list[int] = []
        for num_rows, position, key_position, follows, _ in self.readers:
            rows.extend(range(position, position + num_rows))
            keys.extend(range(key_position, key_position + num_rows) if follows else [key_position] * num_rows)
        return torch.tensor(rows, device=self.rows.device), torch.tensor(keys, device=self.rows.device)

    def by_group(self) -> dict[range, list[tuple[int, int]]]:
        """For the rows of each group, the calls that they make: number and first stacked query.

        They are in the order of the keys' positions; keys at the same position in the order of the group's reads, in
        which documents come by their keys, so that their order in the prompt makes no difference.
        """
        found: dict[range, list[tuple[int, int, int, int]]] = {}
        readers = iter(self.readers)
        for number, call in enumerate(self.calls):
            first = call.first
            while first < call.last:
                count, _, position, _, run = next(readers)
                row = self.row_numbers[first]
                found.setdefault(range(row, row + count), []).append((position, run, number, first))
                first += count
        return {rows: [(number, first) for *_, number, first in sorted(calls)] for rows, calls in found.items()}

    def needed_slots(self) -> dict[PoolName | None, int]:
        """Min slots of every pool, so that all reads are inside it; 0: the pool is not read."""
        return {
            pool: max((call.first_slot + call.num_tokens for call in self.calls if call.pool == pool), default=0)
            for pool in POOLS
        }


@dataclass(slots=True)
class _Stack:
    """Readers of one run of keys."""

    causal: bool = False
    needs_mask: bool = False
    readers: list[tuple[RowGroup, Piece, int]] = field(default_factory=list)
    """Groups, their trimmed reads, and the numbers of these; `positions` are those of keys that are not consecutive."""


def plan_reads(groups: Sequence[RowGroup], mask: MaskSpec, device: torch.device) -> ReadPlan:
    """Trims every read to what the mask shows, and stacks the readers of equal runs into one call."""
    stacks: dict[tuple[object, ...], _Stack] = {}
    for group in groups:
        first_seen, last_seen = _seen_from(group, mask)
        for number, read in enumerate(group.reads):
            seen = read.visibility
            if seen is not None and seen.ends and not any(seen.ends):
                continue
            # a following run is equally far from all rows: all see what the first one sees
            lowest = mask.lowest_seen(group.position) if read.follows else first_seen
            trimmed, masked = _trimmed(read, lowest)
            if trimmed is None:
                continue
            masked = masked or (last_seen > trimmed.position and not read.follows)
            run = (read.pool, trimmed.first_slot, trimmed.num_tokens)
            # a mask belongs to one reader: such a call is never shared, not even for two reads of one chunk
            stack = stacks.setdefault((*run, len(stacks)) if masked else run, _Stack(needs_mask=masked))
            stack.readers.append((group, trimmed, number))
        if not group.reads_itself:
            positions = group.rules.positions
            masked = last_seen > (min(positions) if positions else group.position)
            own = Piece("request", group.first_row, group.num_rows, group.position, positions=positions)
            reader = (group, own, len(group.reads))
            stacks[None, group.first_row, group.num_rows] = _Stack(group.num_rows > 1, masked, [reader])
    return _stacked(stacks, mask, device)


def _seen_from(group: RowGroup, mask: MaskSpec) -> tuple[int, int]:
    """The earliest position that any row of a group sees, and the earliest that all of them see."""
    if not group.rules.positions:
        return group.lowest_seen(mask, 0), group.lowest_seen(mask, group.num_rows - 1)
    if mask.kind == "full" and not group.rules.window:
        return _NOWHERE, _NOWHERE
    lowest = [group.lowest_seen(mask, row) for row in range(group.num_rows)]
    return min(lowest), max(lowest)


def _trimmed(read: Piece, lowest: int) -> tuple[Piece | None, bool]:
    """A read without the keys that no row sees, and whether the rest needs a mask; None: no key is left."""
    if read.visibility is not None:
        return read, True
    if read.positions:
        return read, lowest > min(read.positions)
    hidden = max(0, lowest - read.position)
    if not hidden:
        return read, False
    if hidden >= read.num_tokens:
        return None, False
    return (
        replace(
            read,
            first_slot=read.first_slot + hidden,
            num_tokens=read.num_tokens - hidden,
            position=read.position + hidden,
        ),
        False,
    )


def _stacked(stacks: dict[tuple[object, ...], _Stack], mask: MaskSpec, device: torch.device) -> ReadPlan:
    calls: list[Call] = []
    rows: list[int] = []
    distances: list[int] = []
    readers: list[Reader] = []
    for (pool, first_slot, num_tokens, *_), stack in stacks.items():
        first = len(rows)
        for group, read, number in stack.readers:
            rows.extend(range(group.first_row, group.first_row + group.num_rows))
            distances.extend(
                range(read.distance, read.distance + group.num_rows)
                if read.follows
                else [read.distance] * group.num_rows
            )
            readers.append((group.num_rows, group.position, read.position, read.follows, number))
        shown = _shown_keys(stack, mask, num_tokens, device) if stack.needs_mask else None  # type: ignore[arg-type]
        causal = stack.causal and shown is None
        calls.append(Call(first, len(rows), pool, first_slot, num_tokens, causal, shown))  # type: ignore[arg-type]
    num_rows = max(rows) + 1
    return ReadPlan(
        tuple(calls),
        torch.tensor(rows, device=device),
        torch.tensor(distances),
        num_rows,
        is_moved=any(distances),
        is_single=rows == list(range(num_rows)),
        row_numbers=tuple(rows),
        readers=tuple(readers),
    )


def _shown_keys(stack: _Stack, mask: MaskSpec, num_tokens: int, device: torch.device) -> Tensor:
    """[rows, num_tokens] bool: the keys that the rows of the only reader see."""
    ((group, read, _),) = stack.readers
    shown = torch.ones(group.num_rows, num_tokens, dtype=torch.bool, device=device)
    if (mask.kind != "full" or group.rules.window) and not read.follows:
        lowest = torch.tensor([group.lowest_seen(mask, row) for row in range(group.num_rows)], device=device)
        keys = torch.tensor(read.positions or range(read.position, read.position + num_tokens), device=device)
        shown &= keys[None, :] >= lowest[:, None]
    seen = read.visibility
    if seen is not None and seen.hidden:
        shown[:, torch.tensor(seen.hidden, device=device)] = False
    if seen is not None and seen.ends:
        shown &= torch.arange(num_tokens, device=device)[None, :] < torch.tensor(seen.ends, device=device)[:, None]
    if stack.causal:
        shown &= torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril_()
    return shown
