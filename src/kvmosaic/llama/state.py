"""Saved sequences of llama.cpp as arrays: the positions of their cells, and the rows of keys and values of each layer.

    header      two numbers
    memory      streams = 1, number of cells; for each cell position, number of sequences, their ids;
                whether values are transposed = 0, number of layers; newer builds: by what keys and values are rotated;
                for each layer type, bytes of a row, a row of keys for each cell; then the same for values
    memory      a second one, in models with sliding windows: first the layers without one, then those with

Cells are in no order, and in another one in each memory; `parse` gives them by position.

llama.cpp's loader never gets bytes from outside: tiers keep rows, and `pack` writes the rest.

A cell holds the keys and values of one token. It has one position, and a set of sequences that see it. Tagging a cell
with another sequence copies no byte; a cell without a sequence is free.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvmosaic.errors import UnsupportedModel

_HEADER = struct.Struct("<II")
_COUNTS = struct.Struct("<II")
_FLAGS = struct.Struct("<II")
_ROTATION = struct.Struct("<I")
_LAYER = struct.Struct("<iQ")
_CELL = struct.Struct("<iII")
SavedState: TypeAlias = bytes | bytearray
"""A saved sequence, as llama.cpp writes and reads it."""
F32, F16, BF16 = 0, 1, 30
"""Types of ggml."""


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Keys, or values, of one layer: their type in ggml, and one row of bytes per cell."""

    kind: int
    rows: NDArray[np.uint8]
    """[n, bytes of a row]"""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """One memory of a saved sequence."""

    positions: NDArray[np.int32]
    """[n]"""
    keys: tuple[LayerRows, ...]
    values: tuple[LayerRows, ...]
    rotations: tuple[int, ...] = ()
    """By what llama.cpp rotates keys and values before it quantizes them; () in builds that do not tell."""

    def take(self, order: Sequence[int] | NDArray[np.int64]) -> MemoryState:
        """These cells, in this order."""
        index = np.asarray(order)
        return MemoryState(
            self.positions[index],
            tuple(LayerRows(each.kind, each.rows[index]) for each in self.keys),
            tuple(LayerRows(each.kind, each.rows[index]) for each in self.values),
            self.rotations,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SequenceState:
    """A saved sequence."""

    header: tuple[int, int]
    memories: tuple[MemoryState, ...]

    @property
    def positions(self) -> list[int]:
        """Position of each cell; the memories of a sequence have the same cells."""
        found: list[int] = self.memories[0].positions.tolist()
        return found

    def take(self, order: Sequence[int]) -> SequenceState:
        """These cells, in this order."""
        return SequenceState(self.header, tuple(memory.take(order) for memory in self.memories))


def parse(state: SavedState) -> SequenceState:
    """Reads a saved sequence.

    Raises:
        UnsupportedModel: this build of llama.cpp saves sequences in another form.
    """
    # Read as the form without rotations, the first rows of one with them have 0 bytes, or more than there are.
    try:
        return _parse(state, 0)
    except (struct.error, ValueError):
        pass
    try:
        return _parse(state, 2)
    except (struct.error, ValueError) as error:
        raise UnsupportedModel(f"llama.cpp saved a sequence in an unknown form ({error})") from error


def _parse(state: SavedState, num_rotations: int) -> SequenceState:
    header, place = _HEADER.unpack_from(state), _HEADER.size
    memories: list[MemoryState] = []
    while place < len(state):
        memory, place = _read_memory(state, place, num_rotations)
        if np.any(np.diff(memory.positions) < 0):
            memory = memory.take(np.argsort(memory.positions, kind="stable"))
        if memories and not np.array_equal(memory.positions, memories[0].positions):
            raise ValueError("memories with other cells")
        memories.append(memory)
    return SequenceState((header[0], header[1]), tuple(memories))


def pack(state: SequenceState) -> bytes:
    """Inverse of `parse`."""
    parts: list[bytes | memoryview] = [_HEADER.pack(*state.header)]
    for memory in state.memories:
        parts.append(_COUNTS.pack(1, len(memory.positions)))
        if not len(memory.positions):
            continue
        parts.extend(_CELL.pack(int(position), 1, state.header[1]) for position in memory.positions)
        parts.append(_FLAGS.pack(0, len(memory.keys)))
        parts.extend(_ROTATION.pack(each) for each in memory.rotations)
        for layers in (memory.keys, memory.values):
            for layer in layers:
                parts.append(_LAYER.pack(layer.kind, layer.rows.shape[1]))
                parts.append(np.ascontiguousarray(layer.rows).data)
    return b"".join(parts)


def split(state: SequenceState, num_cells: int) -> list[SequenceState]:
    """Parts of at most so many cells, in order."""
    total = len(state.positions)
    return [state.take(range(first, min(first + num_cells, total))) for first in range(0, total, num_cells)]


def joined(states: Sequence[SequenceState]) -> SequenceState:
    """Saved sequences of one model as one, in order."""
    return gather([(state, number) for state in states for number in range(len(state.positions))])


def gather(cells: Sequence[tuple[SequenceState, int]]) -> SequenceState:
    """Cells of several saved sequences of one model, each with its number in its own, as one sequence."""
    states = list(dict.fromkeys(state for state, _ in cells))
    firsts = dict(zip(states, accumulate((len(state.positions) for state in states), initial=0), strict=False))
    order = [firsts[state] + number for state, number in cells]
    memories = tuple(
        _joined(parts).take(order) if len(parts) > 1 else parts[0].take(order)
        for parts in zip(*(state.memories for state in states), strict=True)
    )
    return SequenceState(states[0].header, memories)


def _joined(parts: Sequence[MemoryState]) -> MemoryState:
    def rows(sides: Iterable[tuple[LayerRows, ...]]) -> tuple[LayerRows, ...]:
        layers = zip(*sides, strict=True)
        return tuple(LayerRows(same[0].kind, np.concatenate([each.rows for each in same])) for same in layers)

    return MemoryState(
        np.concatenate([part.positions for part in parts]),
        rows(part.keys for part in parts),
        rows(part.values for part in parts),
        parts[0].rotations,
    )


def widened(state: SequenceState) -> SequenceState:
    """The same numbers in float32, of float16 or bfloat16."""

    def wide(layer: LayerRows) -> LayerRows:
        if layer.kind == F16:
            return LayerRows(F32, layer.rows.view(np.float16).astype(np.float32).view(np.uint8))
        numbers = layer.rows.view(np.uint16).astype(np.uint32) << 16
        return LayerRows(F32, numbers.view(np.uint8))

    return _each_layer(state, wide)


def narrowed(state: SequenceState, kind: int) -> SequenceState:
    """Numbers in float32 rounded to float16 or bfloat16: to the nearest, of two to the even one."""

    def narrow(layer: LayerRows) -> LayerRows:
        if kind == F16:
            return LayerRows(F16, layer.rows.view(np.float32).astype(np.float16).view(np.uint8))
        bits = layer.rows.view(np.uint32)
        rounded = bits + (0x7FFF + ((bits >> 16) & 1))
        return LayerRows(BF16, (rounded >> 16).astype(np.uint16).view(np.uint8))

    return _each_layer(state, narrow)


def _each_layer(state: SequenceState, change: Callable[[LayerRows], LayerRows]) -> SequenceState:
    return SequenceState(
        state.header,
        tuple(
            replace(memory, keys=tuple(map(change, memory.keys)), values=tuple(map(change, memory.values)))
            for memory in state.memories
        ),
    )


def relabelled(state: SequenceState, offset: int) -> SequenceState:
    """A saved sequence with other positions, and the same keys."""
    memories = tuple(replace(memory, positions=memory.positions + np.int32(offset)) for memory in state.memories)
    return SequenceState(state.header, memories)


def _read_memory(state: SavedState, place: int, num_rotations: int) -> tuple[MemoryState, int]:
    streams, count = _COUNTS.unpack_from(state, place)
    place += _COUNTS.size
    if streams != 1:
        raise ValueError(f"{streams} streams")
    if not count:
        return MemoryState(np.zeros(0, np.int32), (), ()), place
    positions = np.zeros(count, np.int32)
    for index in range(count):
        positions[index], num_sequences, _ = _CELL.unpack_from(state, place)
        if num_sequences != 1:
            raise ValueError(f"{num_sequences} sequences of a cell")
        place += _CELL.size
    transposed, num_layers = _FLAGS.unpack_from(state, place)
    place += _FLAGS.size
    if transposed:
        raise ValueError("transposed values")
    rotations = tuple(_ROTATION.unpack_from(state, place + index * _ROTATION.size)[0] for index in range(num_rotations))
    place += num_rotations * _ROTATION.size
    sides: list[tuple[LayerRows, ...]] = []
    for _ in range(2):
        layers = []
        for _ in range(num_layers):
            kind, width = _LAYER.unpack_from(state, place)
            place += _LAYER.size
            if width < 1:
                raise ValueError(f"rows of {width} bytes")
            rows = np.frombuffer(state, np.uint8, count * width, place).reshape(count, width)
            layers.append(LayerRows(kind, rows))
            place += count * width
        sides.append(tuple(layers))
    return MemoryState(positions, sides[0], sides[1], rotations), place
