"""The block map: the state of every block of both pools, one byte each."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat

from kvmosaic.cache.block_pool import BlockId, BlockPool


class BlockState(IntEnum):
    """State of one block."""

    FREE = 0
    IDLE = 1
    """Cached, without readers: evictable."""
    IN_USE = 2
    """Ref count 1, besides the cache's."""
    SHARED = 3
    """Ref count 2 or more, besides the cache's."""
    PINNED = 4
    """Of a pinned chunk, in use or not."""


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A snapshot of both pools: byte i is the `BlockState` of block i."""

    request: bytes
    chunk_cache: bytes


def _by_references(kept: bool) -> bytes:
    """State per ref count (3: three or more), for blocks with or without a cache reference."""
    free, idle, used, shared = BlockState.FREE, BlockState.IDLE, BlockState.IN_USE, BlockState.SHARED
    return bytes((free, idle, used, shared) if kept else (free, used, shared, shared))


def _up_to_three(references: array[int]) -> bytes:
    """Every ref count, at most 3, as a byte."""
    data, width = references.tobytes(), references.itemsize
    pieces = [data[index::width] for index in range(width)]
    lowest = pieces.pop(0 if sys.byteorder == "little" else -1)
    if any(piece.count(0) < len(piece) for piece in pieces):  # more than 255 readers of one block
        return bytes(map(min, references, repeat(3)))
    return lowest.translate(bytes(min(count, 3) for count in range(256)))


def states_of(pool: BlockPool, *, kept: Iterable[BlockId] | None, pinned: Iterable[BlockId] = ()) -> bytes:
    """The state of every block of a pool, in one pass over it.

    Args:
        pool: the pool.
        kept: blocks with a cache reference besides those of readers; None: every used block.
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
