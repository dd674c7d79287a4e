"""What a model's keys and values have to do with positions: measured on one token at two positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvmosaic.errors import UnsupportedModel
from kvmosaic.llama.library import NO_FAULTS, LlamaContext, LlamaFile, Rows, ShiftFaults
from kvmosaic.llama.state import LayerRows, MemoryState, parse

_FAR = 37
_SAME = 1e-3
"""Largest difference of what is the same, as a share of the largest number."""


@dataclass(frozen=True, slots=True)
class PositionFacts:
    """How keys and values depend on the position of their token."""

    faults: ShiftFaults = NO_FAULTS
    reason: str = ""
    """Why cached tokens cannot be composed; empty when they can."""


def measure_positions(file: LlamaFile) -> PositionFacts:
    """Computes a token at position 0 and at another one. It sees itself alone, so only a rotation can differ.

    Raises:
        UnsupportedModel: llama.cpp saves the sequences of this model in another form.
        ModelError: llama.cpp cannot run it.
    """
    context = file.context(num_cells=32, num_sequences=3, num_threads=1, max_rows=2, cache_type="f32")
    try:
        context.forward([Rows([0], 0, 0), Rows([0], min(_FAR, file.max_positions - 1), 1)])
        here, there = (parse(context.save(sequence)).memories for sequence in range(2))
        if not any(memory.keys for memory in here):
            raise UnsupportedModel(f"{file.path.name} keeps no keys and values in llama.cpp: there is nothing to cache")
        pairs = list(zip(here, there, strict=True))
        unrotated = tuple(tuple(map(_same, one.keys, other.keys)) for one, other in pairs)
        if not all(all(map(_same, one.values, other.values)) for one, other in pairs):
            return PositionFacts(reason="its values depend on the position")
        if all(all(layers) for layers in unrotated):
            return PositionFacts(reason="its keys are not rotated, so what a token sees depends on distances otherwise")
        if not context.can_shift:
            return PositionFacts(reason="llama.cpp cannot shift its keys")
        return PositionFacts(ShiftFaults(unrotated if any(map(any, unrotated)) else (), _scales(context, here)))
    finally:
        context.close()


def _scales(context: LlamaContext, before: tuple[MemoryState, ...]) -> tuple[tuple[NDArray[np.float32], ...], ...]:
    """By what a shift multiplies each number of a key: measured on a shift by nothing."""
    context.shift(0, 1)
    context.shift(0, -1)
    context.forward([Rows([0], 0, 2)])
    after = parse(context.save(0)).memories
    found = tuple(tuple(map(_scale, memory.keys, other.keys)) for memory, other in zip(after, before, strict=True))
    return found if any(np.any(scale != 1) for layers in found for scale in layers) else ()


def _scale(after: LayerRows, before: LayerRows) -> NDArray[np.float32]:
    numbers, others = after.rows.view(np.float32)[0], before.rows.view(np.float32)[0]
    is_zero = others == 0
    scale = np.where(is_zero, 1, numbers / np.where(is_zero, 1, others)).astype(np.float32)
    changed = np.abs(scale - 1) > _SAME
    return np.where(changed, np.median(scale[changed]) if changed.any() else 1, 1).astype(np.float32)


def _same(one: LayerRows, other: LayerRows) -> bool:
    numbers, others = one.rows.view(np.float32), other.rows.view(np.float32)
    return bool(np.abs(numbers - others).max() <= _SAME * np.abs(numbers).max())
