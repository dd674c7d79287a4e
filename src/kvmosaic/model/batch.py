"""Batch: the rows of one forward, flattened, with their slots and reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmosaic.attention import ORDINARY_ROWS, Piece, PoolName, RowGroup, RowRules, Write


@dataclass(frozen=True, slots=True)
class SpanRows:
    """Consecutive tokens of one span, to be computed in a step.

    token_ids: the tokens
    position: position of the first one
    pool, slots: where their keys and values are written, one slot per token
    reads: the stored keys that all of them see: earlier spans, and earlier tokens of their own span
    reads_itself: a single token whose own slot is already among the reads
    num_logits: number of tokens at the end that need logits
    rules: what is special about rows of a repair, or of a text with a rolling window
    """

    token_ids: Sequence[int]
    position: int
    pool: PoolName
    slots: Sequence[int]
    reads: tuple[Piece, ...]
    reads_itself: bool = False
    num_logits: int = 0
    rules: RowRules = ORDINARY_ROWS


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one forward as tensors: T tokens of any number of spans, R rows that need logits."""

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor
    groups: tuple[RowGroup, ...]
    writes: tuple[Write, ...]


def flatten(spans: Sequence[SpanRows], device: torch.device, *, writes: bool = True) -> Batch:
    """Concatenates the rows of all spans; without `writes`, their keys and values are not stored."""
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    groups: list[RowGroup] = []
    written: dict[PoolName, tuple[list[int], list[int]]] = {}
    for span in spans:
        first, count = len(token_ids), len(span.token_ids)
        token_ids.extend(span.token_ids)
        positions.extend(span.rules.positions or range(span.position, span.position + count))
        groups.append(RowGroup(first, count, span.position, span.reads, span.reads_itself, span.rules))
        rows, slots = written.setdefault(span.pool, ([], []))
        rows.extend(range(first, first + count))
        slots.extend(span.slots)
        logit_rows.extend(range(len(token_ids) - span.num_logits, len(token_ids)))
    return Batch(
        torch.tensor(token_ids, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(logit_rows, dtype=torch.long, device=device),
        tuple(groups),
        tuple(
            Write(pool, _slice_or_index(rows, device), _slice_or_index(slots, device))
            for pool, (rows, slots) in written.items()
            if writes
        ),
    )


def _slice_or_index(numbers: list[int], device: torch.device) -> Tensor | slice:
    """A slice if the numbers are consecutive, which avoids a scatter."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[-1] + 1)
    return torch.tensor(numbers, device=device)
