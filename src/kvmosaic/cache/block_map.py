"""The block map: what every block of both pools is doing, one small number each."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat

from kvmosaic.cache.block_pool import BlockId, BlockPool


class BlockState(IntEnum):
    """What one block is doing."""

    FREE = 0
    IDLE = 1
    """Kept by a cache, read by nobody: it leaves when room is needed."""
    IN_USE = 2
    """Read or written by one holder."""
    SHARED = 3
    """Read by several."""
    PINNED = 4
    """Of a pinned chunk, in use or not."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """One moment of both pools: byte i is the `BlockState` of block i."""

    request: bytes
    chunk_cache: bytes


def _by_references(kept: bool) -> bytes:
    """State by number of references (3: three or more), for blocks with or without a reference of a cache."""
    free, idle, used, shared = BlockState.FREE, BlockState.IDLE, BlockState.IN_USE, BlockState.SHARED
    return bytes((free, idle, used, shared) if kept else (free, used, shared, shared))


def _up_to_three(references: array[int]) -> bytes:
    """Every number, at most 3, as a byte."""
    data, width = references.tobytes(), references.itemsize
    pieces = [data[index::width] for index in range(width)]
    lowest = pieces.pop(0 if sys.byteorder == "little" else -1)
    if any(piece.count(0) < len(piece) for piece in pieces):  # more than 255 readers of one block
        return bytes(map(min, references, repeat(3)))
    return lowest.translate(bytes(min(count, 3) for count in range(256)))


def states_of(pool: BlockPool, *, kept: Iterable[BlockId] | None, pinned: Iterable[BlockId] = ()) -> bytes:
    """The state of every block of a pool, in one pass over it.

    Args:
        pool: whose blocks.
        kept: blocks to which a cache has a reference, besides those of its readers; None: every used block.
        pinned: blocks of pinned chunks.
    """
    counts = _up_to_three(pool.references)
    if kept is None:
        states = bytearray(counts.translate(_by_references(True).ljust(256, b"\0")))
    else:
        states = bytearray(counts.translate(_by_references(False).ljust(256, b"\0")))
        by_references = _by_references(True)
        for block_id in kept:
            states[block_id] = by_references[counts[block_id]]
    for block_id in pinned:
        states[block_id] = BlockState.PINNED
    return bytes(states)
