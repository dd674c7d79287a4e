"""Deviations: how far the cached keys of chunks are from what they are when chunks see what stands before them.

All tokens that did not see everything before them go through the first layer once more, in their places; the keys of
the second layer tell how much that changes (CacheBlend). Nothing is written.

Keys and values of the first layer depend on nothing but the token and its place. So what stands before a token is read
there from the chunks as they are, and the tokens need not be computed together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as List

import torch
from torch import Tensor

from kvmosaic.engine.sequence import Sequence
from kvmosaic.engine.span_reads import run_reads
from kvmosaic.layout import Layout, repair_positions
from kvmosaic.model.batch import SpanRows
from kvmosaic.model.runner import Runner
from kvmosaic.rope import rotate

LAYER = 1
_Part = tuple[int, int, int]
"""Neighbouring tokens of a chunk: the index of its span, the first of them, and one past the last."""


def measure_deviations(sequence: Sequence, runner: Runner, most_tokens: int) -> dict[int, List[float]]:
    """By span of an open chunk: the squared distance of every token's keys, in the second layer.

    Args:
        sequence: holds its chunks, computed.
        runner: computes.
        most_tokens: of one forward.
    """
    repair = sequence.request.repair
    assert repair is not None
    layout = repair.layout
    stands = repair_positions(layout)
    deviations: dict[int, list[float]] = {index: [] for index in repair.open_chunks}
    for parts in _forwards(layout, repair.open_chunks, most_tokens):
        keys = runner.keys_of([_rows(sequence, layout, stands, part) for part in parts], LAYER)
        row = 0
        for index, first, last in parts:
            cached = _cached_keys(sequence, layout, stands, runner, (index, first, last))
            found = keys[row : row + last - first].to(cached.dtype)
            deviations[index] += (found - cached).square().sum((1, 2)).tolist()
            row += last - first
    return dict(deviations)


def _forwards(layout: Layout, chunks: Iterable[int], most_tokens: int) -> Iterator[list[_Part]]:
    """What is computed at once."""
    parts: list[_Part] = []
    room = most_tokens
    for index in chunks:
        first, num_tokens = 0, layout.spans[index].num_tokens
        while first < num_tokens:
            last = min(num_tokens, first + room)
            parts.append((index, first, last))
            room -= last - first
            first = last
            if not room:
                yield parts
                parts, room = [], most_tokens
    if parts:
        yield parts


def _rows(sequence: Sequence, layout: Layout, stands: Mapping[int, int], part: _Part) -> SpanRows:
    """Tokens of a chunk in their place, that see all that stands before them."""
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
    )


def _cached_keys(sequence: Sequence, layout: Layout, stands: Mapping[int, int], runner: Runner, part: _Part) -> Tensor:
    """[T, G, D], keys of a chunk, moved to where its tokens stand when they are repaired."""
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
