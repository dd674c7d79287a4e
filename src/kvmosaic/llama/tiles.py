"""Tiles: llama.cpp's attention on CPUs takes 64 rows at once, or else one by one, which is slower.

So a forward of fewer rows that read many tokens takes less time with 64. And rows of a tile look at all cells that are
in use, as long as if they read them: rows that read something else take less time in a forward of their own, for which
cells that they do not read move to host memory. CPU milliseconds of SmolLM2-135M, one thread (a repeated run differs by
up to a tenth):

    rows over 2,400 tokens    16     24     32     48     64    padded
    Q4_1                     353    540    714   1113    658       671
    Q8_0                     331    479    628    942    513       453

    rows over 600 tokens      16     24     32     48     64    padded
    Q4_1                     158    232    306    456    443       443
    Q8_0                     143    206    284    384    336       341

    2,048 rows of two prompts of 1,024 tokens, while others have cells in use    0       2,048    4,096    6,144
    Q8_0, milliseconds of each row                                               5.7     6.5      8.0      10.3
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

TILE = 64
TILED_TYPES = ("f16", "f32")
"""Types of caches that are read in tiles."""
_ONE_BY_ONE, _TILED = 4.5, 1.2
"""Time of a multiplication in attention, by that of one in linear layers of Q4_1."""
_SKIPPED = 0.2
"""The same for a token that a row skips, where rows are taken one by one; in tiles it costs as much as one that is
read."""
_MOVED_ROWS = 64
"""Moving a cell to host memory and back takes as long as looking at it in a tile so often."""
_FORWARD_ROWS = 8
"""A further forward takes as long as the linear layers of so many rows in a large one: it reads all weights."""
_LINEAR = {"Q8_0": 0.7}
"""Time of a multiplication in linear layers of other weights, by that of Q4_1; 1 where it was not measured."""


class RowCost(NamedTuple):
    """Multiplications of one row."""

    linear: int
    """In the linear layers, as many as take their time with weights of Q4_1."""
    per_token: int
    """In attention, for each token that it reads."""


def row_cost(num_parameters: int, weight_type: str, per_token: int) -> RowCost:
    """Cost of a row.

    Args:
        num_parameters: of the model.
        weight_type: of most weights, as llama.cpp names it.
        per_token: multiplications in attention for each token that it reads.
    """
    return RowCost(int(num_parameters * _LINEAR.get(weight_type, 1.0)), per_token)


class Part(NamedTuple):
    """Rows that may share a forward with others."""

    num_rows: int
    reads: Mapping[Hashable, int]
    """The number of tokens of each run of cells that its rows read."""


def is_shorter_apart(one: Part, other: Part, cost: RowCost) -> bool:
    """Whether two parts take less time in two forwards than in one, in which rows look at the cells of both."""
    only_one = sum(count for run, count in one.reads.items() if run not in other.reads)
    only_other = sum(count for run, count in other.reads.items() if run not in one.reads)
    skipped = one.num_rows * (only_other + other.num_rows) + other.num_rows * (only_one + one.num_rows)
    together = (_TILED if one.num_rows + other.num_rows >= TILE else _SKIPPED) * cost.per_token * skipped
    moved = min(only_one + one.num_rows, only_other + other.num_rows)
    apart = _FORWARD_ROWS * cost.linear + _TILED * cost.per_token * _MOVED_ROWS * moved
    return apart < together


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
