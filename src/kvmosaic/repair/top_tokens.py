"""Top-k selection of tokens over all chunks."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from heapq import nlargest
from typing import Protocol, SupportsIndex

from kvmosaic.errors import InvalidRepair

_ROUNDING = 1e-6


class Choosable(Protocol):
    """The facts of a chunk that selection needs; `ChunkSignals` has them."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the chunk."""

    @property
    def num_open(self) -> int:
        """Tokens that may be chosen."""


def budget_of(chunks: Sequence[Choosable], fraction: float) -> int:
    """A fraction of all chunks' tokens: rounded down, but at least one if any may be chosen."""
    num_open = sum(chunk.num_open for chunk in chunks)
    share = fraction * sum(chunk.num_tokens for chunk in chunks)
    return min(num_open, max(1, int(share + _ROUNDING)))  # 0.29 of 100 is 29, though 0.29 * 100 is a little less


def highest_scored(
    chunks: Sequence[Choosable], scores: Sequence[Sequence[float]], fraction: float
) -> list[Sequence[int]]:
    """For every chunk the indexes of its chosen tokens, ascending; ties go to the earlier token."""
    budget = budget_of(chunks, fraction)
    ranked = nlargest(
        budget,
        (
            (scores[number][token], -number, -token)
            for number, chunk in enumerate(chunks)
            for token in range(chunk.num_open)
        ),
    )
    chosen: list[list[int]] = [[] for _ in chunks]
    for _, number, token in ranked:
        chosen[-number].append(-token)
    return [sorted(tokens) for tokens in chosen]


def checked_choice(chunks: Sequence[Choosable], chosen: Sequence[Sequence[int]], policy: object) -> list[list[int]]:
    """A policy's choice, sorted and without exact chunks.

    Raises:
        InvalidRepair: the wrong number of lists, or an index outside its chunk.
    """
    if len(chosen) != len(chunks):
        raise InvalidRepair(f"{policy} chose tokens for {len(chosen)} chunks, and the prompt has {len(chunks)}")
    checked: list[list[int]] = []
    for number, (chunk, tokens) in enumerate(zip(chunks, chosen, strict=True)):
        numbers = [_checked_token(token, number, chunk, policy) for token in tokens]
        checked.append(sorted(set(numbers)) if chunk.num_open else [])
    return checked


def _checked_token(token: SupportsIndex, number: int, chunk: Choosable, policy: object) -> int:
    index = -1 if isinstance(token, bool) or not hasattr(token, "__index__") else operator.index(token)
    if not 0 <= index < chunk.num_tokens:
        raise InvalidRepair(
            f"{policy} chose token {token!r:.80} of chunk {number}; its tokens are 0 to {chunk.num_tokens - 1}"
        )
    return index
