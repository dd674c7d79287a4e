"""Mover: copies keys and values inside the paged cache, and rotates keys on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvmosaic.integrations.vllm.operations import Move
from kvmosaic.integrations.vllm.worker.key_rotation import Factors, KeyRotation, arithmetic
from kvmosaic.integrations.vllm.worker.kv_layout import KVLayout


class Mover:
    """Carries out all moves of a step, layer by layer.

        slots of all moves:    │ rotated … rotated │ only copied … │        split into parts of bounded size
        for each part and layer:    read sources ─▶ rotate keys ─▶ write targets

    Blocks that are read must not be written in the same step. Nothing is written before all moves are known to be
    possible. A move by distance 0 copies bytes.
    """

    def __init__(self, places: KVLayout, part_tokens: int = 2048) -> None:
        """Buffers at most `part_tokens` tokens of one layer at a time."""
        assert part_tokens > 0
        self.places = places
        self.part_tokens = part_tokens

    def move(self, moves: Sequence[Move]) -> None:
        """Carries out moves, or none of them.

        Raises:
            PromptTooLong: a key's target position is not in the model's table; nothing was written.
            ValueError: a run outside its blocks, or a block that is read and written; nothing was written.
        """
        moves = [move for move in moves if move.num_tokens]
        for move in moves:
            for position in (move.position, move.position + move.distance):
                self.places.require(position)
                self.places.require(position + move.num_tokens - 1)
        if not moves:
            return
        moves.sort(key=lambda move: move.distance == 0)
        sources = torch.cat([self.places.slots(m.source_blocks, m.source_start, m.num_tokens) for m in moves])
        targets = torch.cat([self.places.slots(m.target_blocks, m.target_start, m.num_tokens) for m in moves])
        if torch.isin(targets, sources).any():
            raise ValueError("a move reads a slot that another one writes")
        old = torch.cat([torch.arange(m.position, m.position + m.num_tokens) for m in moves])
        distance = torch.cat([torch.full((m.num_tokens,), m.distance) for m in moves])
        num_turned = sum(move.num_tokens for move in moves if move.distance)
        device = self.places.device
        sources, targets, old, new = (tensor.to(device) for tensor in (sources, targets, old, old + distance))
        for start, end in self._parts(num_turned, len(sources)):
            is_turned = start < num_turned
            self._move_part(sources[start:end], targets[start:end], (old[start:end], new[start:end]), is_turned)

    def _parts(self, num_turned: int, total: int) -> Iterator[tuple[int, int]]:
        for first, last in ((0, num_turned), (num_turned, total)):
            for start in range(first, last, self.part_tokens):
                yield start, min(start + self.part_tokens, last)

    def _move_part(self, sources: Tensor, targets: Tensor, positions: tuple[Tensor, Tensor], is_turned: bool) -> None:
        known: dict[tuple[KeyRotation, torch.dtype], Factors] = {}
        for place in self.places.layers:
            keys, values = place.layout.read(sources)
            if is_turned and place.rotation is not None:
                which = place.rotation, arithmetic(keys.dtype)
                if which not in known:
                    known[which] = place.rotation.factors(*positions, dtype=which[1])
                place.rotation.rotate(keys, known[which])
            place.layout.write(targets, keys, values)
