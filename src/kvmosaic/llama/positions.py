"""What a model's keys and values have to do with positions: measured on one token at two positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvmosaic.errors import UnsupportedModel
from kvmosaic.llama.library import LlamaFile, Rows
from kvmosaic.llama.state import LayerRows, parse

_FAR = 37
_SAME = 1e-3
"""Largest difference of what is the same, as a share of the largest number."""


@dataclass(frozen=True, slots=True)
class PositionFacts:
    """How keys and values depend on the position of their token."""

    unrotated: tuple[tuple[bool, ...], ...]
    """For each memory and layer, whether its keys are the same at every position."""
    reason: str = ""
    """Why cached tokens cannot be composed; empty when they can."""


def measure_positions(file: LlamaFile) -> PositionFacts:
    """Computes a token at position 0 and at another one. It sees itself alone, so only a rotation can differ.

    Raises:
        UnsupportedModel: llama.cpp saves the sequences of this model in another form.
        ModelError: llama.cpp cannot run it.
    """
    context = file.context(num_cells=32, num_sequences=2, num_threads=1, max_rows=2, cache_type="f32")
    try:
        context.forward([Rows([0], 0, 0), Rows([0], min(_FAR, file.max_positions - 1), 1)])
        here, there = (parse(context.save(sequence)).memories for sequence in range(2))
    finally:
        context.close()
    if not any(memory.keys for memory in here):
        raise UnsupportedModel(f"{file.path.name} keeps no keys and values in llama.cpp: there is nothing to cache")
    pairs = list(zip(here, there, strict=True))
    unrotated = tuple(tuple(map(_same, one.keys, other.keys)) for one, other in pairs)
    if not all(all(map(_same, one.values, other.values)) for one, other in pairs):
        return PositionFacts(unrotated, "its values depend on the position")
    if all(all(layers) for layers in unrotated):
        return PositionFacts(unrotated, "its keys are not rotated: what a token sees depends on distances otherwise")
    return PositionFacts(unrotated)


def _same(one: LayerRows, other: LayerRows) -> bool:
    numbers, others = one.rows.view(np.float32), other.rows.view(np.float32)
    return bool(np.abs(numbers - others).max() <= _SAME * np.abs(numbers).max())
