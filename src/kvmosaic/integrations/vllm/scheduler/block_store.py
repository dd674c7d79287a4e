"""Block store: vLLM's own block pool, read as a store of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

KV_GROUP = 0
"""Composing requires all layers in one KV cache group: see `trouble`."""


class BlockStore:
    """Finds cached blocks, and holds references to the blocks that this step's moves read.

    A reference raises a block's ref count, as a request does. It is acquired while a step is being scheduled and
    released when that step is complete: later steps write into the block only after this step's moves.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: list[Any] = []

    @property
    def num_blocks(self) -> int:
        """Number of usable blocks."""
        return int(self._pool.num_gpu_blocks) - 1  # one is the null block

    @property
    def table(self) -> object | None:
        """The hash table of cached blocks: a new object after a reset of the prefix cache; None if that is unknown."""
        return getattr(self._pool, "cached_block_hash_to_block", None)

    def find(self, hashes: Sequence[Any]) -> tuple[Any, ...] | None:
        """The cached blocks of these hashes; None if any is missing."""
        blocks = []
        for block_hash in hashes:
            found = self._pool.get_cached_block(block_hash, [KV_GROUP])
            if not found:
                return None
            blocks.append(found[KV_GROUP])
        return tuple(blocks)

    def num_leading(self, hashes: Sequence[Any]) -> int:
        """Number of leading hashes that are cached."""
        for number, block_hash in enumerate(hashes):
            if not self._pool.get_cached_block(block_hash, [KV_GROUP]):
                return number
        return len(hashes)

    def acquire(self, blocks: Iterable[Any]) -> None:
        """Raises the ref counts of blocks, so that they are not evicted until `release`."""
        blocks = list(blocks)
        self._pool.touch(blocks)
        self._held += blocks

    def release(self) -> None:
        """Releases all references."""
        if self._held:
            held, self._held = self._held, []
            self._pool.free_blocks(reversed(held))
