"""Work list: the reads of every program of the attention kernel, built once per step for all layers of one kind.

The runs that the same rows read are concatenated to one long run. That is split into walks of
about equal length, so that one row over many keys occupies a whole GPU; rows are split into tiles. A program takes one
tile of rows (times the query heads of one key head) through one walk, and writes one partial result per row.

    rows  0 1 2 3 | 4 5     tiles of 4 rows
    keys  [ run A      |  run B  ] [ run B   |  run C  ]      two walks of two segments each: 2 x 2 programs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from kvmosaic.attention.reads import POOLS, Call, ReadPlan

TILE_HEIGHTS = (16, 64, 128)
"""Rows times query heads per key head in one program. Tensor cores need at least 16."""
MIN_WALK = 512
"""Min keys per walk: shorter ones would spend their time on writing and merging partial results."""
MAX_PROGRAMS = 512
"""Max programs for one set of rows, which bounds the number of walks: about four per core of a large GPU. Those of tall
tiles count twice, as they take twice the memory. Both numbers were the best of nine on an H200."""

_ALL_SEEN = 1 << 40
_NO_UNITS = np.zeros((0, 5), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class WorkList:
    """The work list on the device, as rows of int64 numbers.

    segments: [7 S], of each pool, first slot, number of keys, first stacked query of the call, keys that the call's
        first row sees (each further row sees one more), start of its mask (-1: no mask), keys in a row of the mask
    units: per tile height, [U, 5] first segment, last segment, first row of the tile, number of rows, first place
    partial_slots: [P] slots of partial results, sorted by the row they belong to
    starts: [T + 1] row t owns partial_slots[starts[t]:starts[t + 1]]
    is_direct: every row has one place, so that results go straight to the output
    """

    segments: Int[Tensor, " fields"]
    units: dict[int, Int[Tensor, "units fields"]]
    partial_slots: Int[Tensor, " P"]
    starts: Int[Tensor, " rows+1"]
    is_direct: bool


def tile_height(num_lanes: int, group: int) -> int:
    """The smallest tile that holds all lanes (rows x heads per key head), or else the usual one."""
    if num_lanes <= TILE_HEIGHTS[0]:
        return TILE_HEIGHTS[0]
    return next(height for height in TILE_HEIGHTS[1:] if group <= height)


def walk_length(num_keys: int, num_programs: int) -> int:
    """Keys per walk, when each walk over all of them takes `num_programs` programs."""
    num_walks = max(1, MAX_PROGRAMS // num_programs)
    return MIN_WALK * max(1, -(-num_keys // (num_walks * MIN_WALK)))


Numbers = npt.NDArray[np.int64]


def list_work(plan: ReadPlan, group: int, num_kv_heads: int, device: torch.device) -> WorkList:
    """The work of a plan on the device, in one upload; see `list_arrays`."""
    flat = flat_work(plan, group, num_kv_heads)
    *_, partial_slots, starts = flat
    is_direct = len(partial_slots) == plan.num_rows and bool((np.diff(starts) == 1).all())
    return replace(work_of(iter(uploaded(flat, device))), is_direct=is_direct)


def flat_work(plan: ReadPlan, group: int, num_kv_heads: int) -> list[Numbers]:
    """Segments, units of every tile height, partial slots and starts, each in one row, as `work_of` takes them."""
    segments, units, partial_slots, starts = list_arrays(plan, group, num_kv_heads)
    tables = (segments, *(units.get(height, _NO_UNITS) for height in TILE_HEIGHTS))
    return [*(table.reshape(-1) for table in tables), partial_slots, starts]


def work_of(parts: Iterator[Int[Tensor, " N"]]) -> WorkList:
    """The work list of the next of these parts, which are on a device; rows may have several places."""
    segments, *units = (next(parts) for _ in range(1 + len(TILE_HEIGHTS)))
    by_height = {height: part.view(-1, 5) for height, part in zip(TILE_HEIGHTS, units, strict=True) if len(part)}
    return WorkList(segments, by_height, next(parts), next(parts), is_direct=False)


def uploaded(parts: Sequence[Numbers], device: torch.device) -> list[Int[Tensor, " N"]]:
    """Rows of whole numbers on the device, in one upload, for which the host does not wait."""
    flat = pinned(torch.from_numpy(np.concatenate(parts)), device)
    return list(torch.split(flat.to(device, non_blocking=True), [len(part) for part in parts]))


def pinned(tensor: Shaped[Tensor, "*S"], device: torch.device) -> Shaped[Tensor, "*S"]:
    """A copy in memory from which a GPU copies while the host goes on; of other devices, the tensor itself."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def list_arrays(plan: ReadPlan, group: int, num_kv_heads: int) -> tuple[Numbers, dict[int, Numbers], Numbers, Numbers]:
    """Segments, units, partial slots and starts (see `WorkList`) of a plan.

    For layers with `group` query heads on each of `num_kv_heads` key heads. The split of a row's own runs depends on
    those runs and their readers alone, not on the rest of the step.
    """
    segments: list[tuple[int, ...]] = []
    units: dict[int, list[tuple[int, ...]]] = {}
    owners: list[int] = []
    masks_before = [0, *accumulate(0 if call.mask is None else call.mask.numel() for call in plan.calls)]
    readers: dict[tuple[int, ...], list[int]] = {}
    for number, call in enumerate(plan.calls):
        readers.setdefault(plan.row_numbers[call.first : call.last], []).append(number)
    for rows, numbers in readers.items():
        height = tile_height(len(rows) * group, group)
        num_rows = height // group
        tiles = range(0, len(rows), num_rows)
        num_keys = sum(plan.calls[number].num_tokens for number in numbers)
        length = walk_length(num_keys, len(tiles) * num_kv_heads * (2 if height > TILE_HEIGHTS[0] else 1))
        for first, last in _walks(plan.calls, numbers, masks_before, length, segments):
            for tile in tiles:
                count = min(num_rows, len(rows) - tile)
                units.setdefault(height, []).append((first, last, tile, count, len(owners) + tile))
            owners.extend(rows)
    owner = np.array(owners, dtype=np.int64)
    starts = np.searchsorted(np.sort(owner), np.arange(plan.num_rows + 1))
    return (
        np.array(segments, dtype=np.int64),
        {height: np.array(listed, dtype=np.int64) for height, listed in units.items()},
        np.argsort(owner, kind="stable"),
        starts,
    )


def _walks(
    calls: Sequence[Call],
    numbers: Sequence[int],
    masks_before: Sequence[int],
    length: int,
    segments: list[tuple[int, ...]],
) -> list[tuple[int, int]]:
    """Appends the segments of some calls, and returns the range of segments of each walk: [first, last)."""
    walks: list[tuple[int, int]] = []
    first, room = len(segments), length
    for number in numbers:
        call, done = calls[number], 0
        while done < call.num_tokens:
            count = min(room, call.num_tokens - done)
            seen = 1 - done if call.causal else _ALL_SEEN
            mask, width = (-1, 0) if call.mask is None else (masks_before[number] + done, call.num_tokens)
            segments.append((POOLS.index(call.pool), call.first_slot + done, count, call.first, seen, mask, width))
            done, room = done + count, room - count
            if not room:
                walks.append((first, len(segments)))
                first, room = len(segments), length
    if first < len(segments):
        walks.append((first, len(segments)))
    return walks
