"""Positions of a composed prompt: where context tokens are computed and where the question sees them.

Each context token has two positions. Context rows (system, documents) attend with the `local` positions; question and
answer rows see the same keys at the `moved` positions. A document's tokens are consecutive in both.

    causal       local = moved = 0 .. T-1, and a document sees the documents before it
    shared       every document starts at n in both; the question starts at n + max m
    sequential   documents are computed at n and moved to follow each other; the question starts at n + sum m

With `sees_system` false (the engine's chunk_context "none") documents are computed alone from position 0 and then
moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["causal", "shared", "sequential"]
STRATEGIES: tuple[Strategy, ...] = ("causal", "shared", "sequential")


@dataclass(frozen=True)
class Positions:
    """Positions of the context tokens and the questions of one prompt."""

    local: list[int]
    moved: list[int]
    question: int  # where every question starts


def place(
    system: int,
    documents: Sequence[int],
    strategy: Strategy,
    sees_system: bool = True,
    gaps: Sequence[int] = (),
) -> Positions:
    """Positions for a system text of `system` tokens and documents of the given lengths.

    `gaps` are extra distances, for training at positions that short prompts do not reach: before each document and
    before the question (one number more than documents).
    """
    gaps = gaps or [0] * (len(documents) + 1)
    local = list(range(system))
    moved = list(range(system))
    if strategy == "shared":
        start = system + gaps[0]
        first = start if sees_system else 0
        for length in documents:
            local += range(first, first + length)
            moved += range(start, start + length)
        return Positions(local, moved, start + max(documents, default=0) + gaps[-1])
    cursor = system
    first = system + gaps[0] if sees_system else 0
    for length, gap in zip(documents, gaps, strict=False):
        cursor += gap
        moved += range(cursor, cursor + length)
        local += range(cursor, cursor + length) if strategy == "causal" else range(first, first + length)
        cursor += length
    return Positions(local, moved, cursor + gaps[-1])
