"""vLLM's own block pool, read as a store of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

KV_GROUP = 0
"""Composing needs all layers in one group: see `trouble`."""


class BlockStore:
    """Looks up cached blocks, and holds those that this step's moves read.

    A hold is one reference more on a block, as a request has. It is taken while a step is being scheduled and given
    back when that step is complete: what a later step writes into the block, it writes after this step's moves.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: list[Any] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use."""
        return int(self._pool.num_gpu_blocks) - 1  # one is the null block

    @property
    def table(self) -> object | None:
        """The table of cached blocks: another object after vLLM forgot them all; None if that cannot be told."""
        return getattr(self._pool, "cached_block_hash_to_block", None)

    def find(self, hashes: Sequence[Any]) -> tuple[Any, ...] | None:
        """The cached blocks of these hashes; None if one is missing."""
        blocks = []
        for block_hash in hashes:
            found = self._pool.get_cached_block(block_hash, [KV_GROUP])
            if not found:
                return None
            blocks.append(found[KV_GROUP])
        return tuple(blocks)

    def num_leading(self, hashes: Sequence[Any]) -> int:
        """How many of these hashes, from the first one on, are cached."""
        for number, block_hash in enumerate(hashes):
            if not self._pool.get_cached_block(block_hash, [KV_GROUP]):
                return number
        return len(hashes)

    def acquire(self, blocks: Iterable[Any]) -> None:
        """Keeps blocks from being taken by others until `release`."""
        blocks = list(blocks)
        self._pool.touch(blocks)
        self._held += blocks

    def release(self) -> None:
        """Gives all holds back."""
        if self._held:
            held, self._held = self._held, []
            self._pool.free_blocks(reversed(held))
