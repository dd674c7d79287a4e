"""Admission of a composed request: its pieces and repairs as operations on the blocks that vLLM allocated to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvmosaic.integrations.vllm.operations import Move, RepairedRun
from kvmosaic.integrations.vllm.scheduler.chunk_prompts import PromptPiece, num_repaired, recomputed_runs
from kvmosaic.integrations.vllm.scheduler.composed import ComposedRequest
from kvmosaic.layout import repair_positions


@dataclass(frozen=True, slots=True)
class Admission:
    """The operations of one request before its first forward, in this order."""

    moves: tuple[Move, ...] = ()
    repairs: tuple[RepairedRun, ...] = ()
    returns: tuple[Move, ...] = ()
    """Moves after the repairs; see `Operations.returns`."""


def admit(composed: ComposedRequest, own: tuple[int, ...], num_cached: int, block_size: int) -> Admission:
    """Plans the operations of a request whose first `num_cached` tokens are in its blocks `own` already."""
    layout, repair = composed.layout, composed.composition.repair
    runs = recomputed_runs(layout, repair, num_cached)
    away = _distances(composed) if runs else {}
    repaired = num_repaired(layout, repair)
    moves: list[Move] = []
    returns: list[Move] = []
    for piece, held in composed.planned:
        source = tuple(block.block_id for block in held)
        distance = away.get(piece.span, 0)
        moves.append(_move(piece, source, own, distance, block_size))
        if distance:
            returns += _returns(piece, source, own, distance, repaired[piece.span], block_size)
    tokens: Any = composed.request.prompt_token_ids
    repairs = (
        RepairedRun(own[: -(-stop // block_size)], start, tuple(tokens[start:stop]), position)
        for start, stop, position in runs
    )
    return Admission(tuple(moves), tuple(repairs), tuple(returns))


def move_in(composed: ComposedRequest, own: tuple[int, ...], block_size: int) -> Admission:
    """Plans the moves of a request that reads its documents in place: of the end of its system text."""
    moves = (
        _move(piece, tuple(block.block_id for block in held), own, 0, block_size) for piece, held in composed.planned
    )
    return Admission(tuple(moves))


def _distances(composed: ComposedRequest) -> dict[int, int]:
    """By span: how much further on a repaired token sees it than the question does; above 0 in shared positions."""
    seen = composed.layout.positions()
    if not composed.composition.repair:
        return {}
    return {index: at - seen[index] for index, at in repair_positions(composed.layout).items() if at > seen[index]}


def _move(piece: PromptPiece, source: tuple[int, ...], own: tuple[int, ...], further: int, size: int) -> Move:
    first, last = piece.start // size, -(-piece.stop // size)
    return Move(
        source_blocks=source,
        source_start=piece.offset % size,
        target_blocks=own[first:last],
        target_start=piece.start % size,
        num_tokens=piece.stop - piece.start,
        position=piece.offset,
        distance=piece.distance + further,
    )


def _returns(
    piece: PromptPiece, source: tuple[int, ...], own: tuple[int, ...], further: int, num_repaired: int, size: int
) -> tuple[Move, Move]:
    """Moves a piece to where the question sees it: its repaired tokens in place, the others from their source again.

    So the keys of the others are rounded once, as without repair.
    """
    first, last = piece.start // size, -(-piece.stop // size)
    blocks, start = own[first:last], piece.start % size
    position = piece.offset + piece.distance + further
    num_others = piece.stop - piece.start - num_repaired
    skipped = piece.offset % size + num_repaired
    return (
        Move(blocks, start, blocks, start, num_repaired, position, -further),
        Move(source, skipped, blocks, start + num_repaired, num_others, piece.offset + num_repaired, piece.distance),
    )
