"""Tiles: llama.cpp's attention on CPUs takes 64 rows at once, or else one by one, which is slower.

So a forward of nearly 64 rows that read many tokens takes less time with 64: a question of 63 tokens over 2,560 others
1.53 s of CPU time, one of 64 tokens 0.76 s (SmolLM2-135M, Q4_1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TILE = 64
TILED_TYPES = ("f16", "f32")
"""Types of caches that are read in tiles."""
_ONE_BY_ONE, _TILED = 4.2, 1.2
"""Time of a multiplication in attention, by that of one in the linear layers; measured with SmolLM2-135M, Q4_1."""


class RowCost(NamedTuple):
    """Multiplications of one row."""

    linear: int
    """In the linear layers."""
    per_token: int
    """In attention, for each token that it reads."""


def num_padding(groups: Sequence[tuple[int, int]], cost: RowCost) -> int:
    """How many further rows make a forward shorter.

    Args:
        groups: number of rows, and tokens that each of them reads, of each part of the forward.
        cost: of a row.
    """
    num_rows = sum(count for count, _ in groups)
    if not 0 < num_rows < TILE:
        return 0
    attention = cost.per_token * sum(count * num_tokens for count, num_tokens in groups)
    alone = cost.linear * num_rows + _ONE_BY_ONE * attention
    tiled = cost.linear * TILE + _TILED * attention * TILE / num_rows
    return TILE - num_rows if tiled < alone else 0
