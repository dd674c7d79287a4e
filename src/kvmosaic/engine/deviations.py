"""Key deviations: how far the cached keys of chunks are from their keys computed with the full preceding context.

All tokens that did not see everything before them run through the first layer once more, at their positions; the keys
of the second layer measure the change (CacheBlend). Nothing is written.

Keys and values of the first layer depend only on token and position. So the preceding context is read from the cached
chunks as they are, and the tokens need not be computed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvmosaic.attention import SpanRows
from kvmosaic.engine.row_builder import run_reads
from kvmosaic.engine.sequence import Sequence
from kvmosaic.layout import Layout, repair_positions
from kvmosaic.model.runner import Runner
from kvmosaic.rope import rotate

if TYPE_CHECKING:
    from kvmosaic.engine.model_runner import StepRunner

LAYER = 1
_Part = tuple[int, int, int]
"""Consecutive tokens of a chunk: index of its span, first token, and one past the last."""


def choose_repair(sequence: Sequence, runner: StepRunner, max_tokens: int) -> None:
    """Replaces a request's layout by its repaired one, once its signals are measured.

    Raises:
        InvalidRepair: the policy failed, or chose tokens that do not exist.
    """
    request, repair = sequence.request, sequence.request.repair
    assert repair is not None
    if "deviation" in repair.signals:
        assert isinstance(runner, Runner), "other engines refuse policies that measure"
        repair.deviations = measure_deviations(sequence, runner, max_tokens)
    layout = repair.repaired_layout()
    request.layout = layout if request.scoring is None else request.scoring.continued(layout)


def measure_deviations(sequence: Sequence, runner: Runner, max_tokens: int) -> dict[int, List[float]]:
    """Squared distance of each token's keys in the second layer, by span of an open chunk.

    Args:
        sequence: a sequence whose chunks are computed.
        runner: runs the forwards.
        max_tokens: maximum tokens of one forward.
    """
    repair = sequence.request.repair
    assert repair is not None
    layout = repair.layout
    stands = repair_positions(layout)
    deviations: dict[int, list[float]] = {index: [] for index in repair.open_chunks}
    for parts in _forwards(layout, repair.open_chunks, max_tokens):
        keys = runner.keys_of([_rows(sequence, layout, stands, part) for part in parts], LAYER)
        row = 0
        for index, first, last in parts:
            cached = _cached_keys(sequence, layout, stands, runner, (index, first, last))
            found = keys[row : row + last - first].to(cached.dtype)
            deviations[index] += (found - cached).square().sum((1, 2)).tolist()
            row += last - first
    return dict(deviations)


def _forwards(layout: Layout, chunks: Iterable[int], max_tokens: int) -> Iterator[list[_Part]]:
    """Batches of parts, one per forward."""
    parts: list[_Part] = []
    room = max_tokens
    for index in chunks:
        first, num_tokens = 0, layout.spans[index].num_tokens
        while first < num_tokens:
            last = min(num_tokens, first + room)
            parts.append((index, first, last))
            room -= last - first
            first = last
            if not room:
                yield parts
                parts, room = [], max_tokens
    if parts:
        yield parts


def _rows(sequence: Sequence, layout: Layout, stands: Mapping[int, int], part: _Part) -> SpanRows:
    """Rows for tokens of a chunk at their positions, which see everything before them."""
    allocation = sequence.allocation
    assert allocation is not None
    index, first, last = part
    reads = tuple(
        read
        for view in layout.last.views
        if view.span <= index
        for read in run_reads(
            layout.spans[view.span],
            allocation.spans[view.span].table,
            stands[view.span] - layout.spans[view.span].start,
            first if view.span == index else layout.spans[view.span].num_tokens,
        )
    )
    return SpanRows(
        token_ids=layout.spans[index].token_ids[first:last],
        position=stands[index] + first,
        pool="request",
        slots=(),
        reads=reads,
        adapter=layout.adapter.digest,
    )


def _cached_keys(sequence: Sequence, layout: Layout, stands: Mapping[int, int], runner: Runner, part: _Part) -> Tensor:
    """[T, G, D], cached keys of a chunk, moved to the positions its tokens have when they are repaired."""
    allocation = sequence.allocation
    assert allocation is not None
    index, first, last = part
    storage, rotation = runner.storages["chunk_cache"], runner.model.layers[LAYER].rotation
    runs = allocation.spans[index].table.runs_between(first, last)
    keys = torch.cat([storage.run(LAYER, run.first_slot, run.num_tokens)[0] for run in runs])
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    distance = stands[index] - layout.spans[index].start
    if not distance or rotation is None:
        return keys
    distances = torch.full((last - first,), distance, device=keys.device)
    return rotate(keys, rotation.tables(distances, dtype=keys.dtype, device=keys.device))
