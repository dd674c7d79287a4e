"""Deviations: how far the cached keys of chunks are from what they are when chunks see what stands before them.

All tokens that did not see everything before them go through the first layer once more, in their places; the keys of
the second layer tell how much that changes (CacheBlend). Nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import torch

from kvmosaic.engine.sequence import Sequence
from kvmosaic.engine.span_reads import run_reads
from kvmosaic.model.batch import SpanRows
from kvmosaic.model.runner import Runner
from kvmosaic.rope import turn

LAYER = 1


def measure_deviations(sequence: Sequence, runner: Runner) -> dict[int, List[float]]:
    """By span of an open chunk: the squared distance of every token's keys, in the second layer.

    The sequence holds its chunks, computed.
    """
    repair, attachment = sequence.request.repair, sequence.attachment
    assert repair is not None and attachment is not None
    layout, open_chunks = repair.layout, repair.open_chunks
    views = {view.span: view for view in layout.last.views}
    reads = tuple(
        read
        for index, view in views.items()
        if index not in open_chunks
        for read in run_reads(
            layout.spans[index], attachment.spans[index].table, view.distance, layout.spans[index].num_tokens
        )
    )
    places = [
        range(layout.position_of(index), layout.position_of(index) + layout.spans[index].num_tokens)
        for index in open_chunks
    ]
    rows = SpanRows(
        token_ids=[token for index in open_chunks for token in layout.spans[index].token_ids],
        position=places[0][0],
        pool="request",
        slots=(),
        reads=reads,
        places=tuple(place for run in places for place in run),
    )
    keys = runner.keys_of(rows, LAYER)
    rotation = runner.model.layers[LAYER].rotation
    storage = runner.storages["chunk_cache"]
    deviations: dict[int, List[float]] = {}
    first = 0
    for index in open_chunks:
        num_tokens, distance = layout.spans[index].num_tokens, views[index].distance
        cached = torch.cat(
            [
                storage.run(LAYER, run.first_slot, run.num_tokens)[0]
                for run in attachment.spans[index].table.runs(num_tokens)
            ]
        )
        precision = torch.promote_types(cached.dtype, torch.float32)
        cached = cached.to(precision)
        if distance and rotation is not None:
            distances = torch.full((num_tokens,), distance, device=cached.device)
            cached = turn(cached, rotation.tables(distances, dtype=precision, device=cached.device))
        difference = keys[first : first + num_tokens].to(precision) - cached
        deviations[index] = difference.square().sum((1, 2)).tolist()
        first += num_tokens
    return deviations
