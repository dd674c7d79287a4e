"""Lookup of a request's pieces in vLLM's prefix cache, and whether a step may read what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from kvmosaic.integrations.vllm.scheduler.block_store import BlockStore, WriteLog
from kvmosaic.integrations.vllm.scheduler.chunk_prompts import PromptPiece, first_private_block
from kvmosaic.integrations.vllm.scheduler.composed import ComposedRequest, SeenBlocks


class ChunkLookup:
    """Finds cached blocks, and tracks in which step they were found and written.

    vLLM counts a block as cached as soon as the step that computes it is scheduled. Moves and repairs of a step run
    before its forward, so they read blocks that were found before that step only.
    """

    def __init__(self, store: Callable[[], BlockStore], block_size: int) -> None:
        self._store, self._block_size = store, block_size
        self.written = WriteLog(block_size)
        self.step = 0
        """Steps scheduled so far."""

    def look(self, composed: ComposedRequest, pieces: Iterable[int], step: int) -> None:
        """Finds the cached blocks of pieces; steps after `step` may read them."""
        for index in pieces:
            blocks = self._store().find(self._hashes(composed, composed.pieces[index]))
            sighting = composed.sightings.get(index)
            if blocks is None:
                composed.sightings.pop(index, None)
            elif sighting is None or sighting.blocks != blocks or self.written.since(blocks, sighting.num_steps):
                composed.sightings[index] = SeenBlocks(blocks, step, self.step)

    def are_complete(self, composed: ComposedRequest, pieces: Iterable[int]) -> bool:
        """Whether all of these pieces were found before the step that is being scheduled."""
        return all(composed.sightings[index].step < self.step for index in pieces)

    def look_at_prefix(self, composed: ComposedRequest, num_local: int, step: int) -> bool:
        """Finds the blocks of the first `num_local` tokens; returns whether they were found before this step.

        Repairs read them before the step's forward, while vLLM reports blocks that only this forward writes as cached.
        """
        blocks = self._store().find(composed.request.block_hashes[: num_local // self._block_size])
        if blocks is None:
            return False
        seen = composed.prefix
        is_known = seen is not None and seen.step < self.step and seen.blocks[: len(blocks)] == blocks
        if seen is not None and is_known and not self.written.since(blocks, seen.num_steps):
            return True
        composed.prefix = SeenBlocks(blocks, step, self.step)
        return not blocks

    def forget_unrepairable(self, composed: ComposedRequest, num_local: int) -> bool:
        """Forgets blocks that this request cannot begin with; returns whether there are any.

        In shared positions, documents of an earlier composed prompt are in its blocks where the question sees them.
        Repaired tokens see them one after the other, so they are moved again from where they were computed.
        """
        first, stop = first_private_block(composed.layout, self._block_size), num_local // self._block_size
        if not composed.composition.repair or not composed.layout.rules.overlaps or first >= stop:
            return False
        self._store().forget(self._store().find(composed.request.block_hashes[first:stop]) or ())
        return True

    def remainder(self, composed: ComposedRequest, index: int, num_local: int) -> tuple[PromptPiece, tuple[Any, ...]]:
        """The rest of a piece after the first `num_local` tokens, and the blocks that hold it."""
        piece, blocks = composed.pieces[index], composed.sightings[index].blocks
        cut = max(num_local - piece.start, 0)
        left = replace(piece, start=piece.start + cut, offset=piece.offset + cut)
        return left, blocks[left.offset // self._block_size - piece.offset // self._block_size :]

    def _hashes(self, composed: ComposedRequest, piece: PromptPiece) -> tuple[Any, ...]:
        first = piece.offset // self._block_size
        stop = piece.offset + piece.stop - piece.start
        return composed.hashes[piece.prompt][first : -(-stop // self._block_size)]
