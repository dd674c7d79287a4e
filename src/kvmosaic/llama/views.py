"""Views: which slots rows read, the sequences of llama.cpp that show them, and layouts that none can show.

Tiles: llama.cpp's attention on CPUs takes 64 rows at once, or else one by one, which is slower.

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

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from kvmosaic.layout import Layout, later_tokens_seen
from kvmosaic.llama.state import SavedState

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


UNLIMITED = 1 << 31
"""More than any span."""


class SlotRun(NamedTuple):
    """Consecutive slots, as rows read them."""

    first: int
    num_tokens: int
    distance: int = 0
    """By how much their keys are moved for the reader."""
    label: int = 0
    """By how much their positions differ from that, with their keys as they are."""
    copy: int = 0
    """How often a reader sees these slots at these positions before: a sequence shows a cell once."""

    @property
    def is_copied(self) -> bool:
        """Whether it cannot be read where it is."""
        return bool(self.distance or self.label or self.copy)


class Target(NamedTuple):
    """Where tokens will be written."""

    positions: range
    after: int | None = None
    """The slot of the token before, if it belongs to the same span."""


class PendingTag(NamedTuple):
    """Positions [first, last) of a view whose cells are still to be those of a home, too."""

    view: SequenceView
    first: int
    last: int


@dataclass(eq=False, slots=True)
class Home:
    """Cells that a range of positions names. While `sequence` is None, they are in `saved`, in host memory."""

    sequence: int | None
    uses: dict[int, int] = field(default_factory=dict)
    """Number of slots of each position's cell."""
    saved: SavedState = b""
    freed: list[int] = field(default_factory=list)
    """Positions of saved cells that were freed since."""
    read_at: int = 0
    """Number of rows that had been computed when it was last read."""
    pending: PendingTag | None = None
    """Cells that only the view has through which they were written."""

    @property
    def num_cells(self) -> int:
        """Cells of its sequence, or of what is saved."""
        return len(self.uses) + len(self.freed)


@dataclass(eq=False, slots=True)
class MovedCopy:
    """A copy of a run's cells, moved. While `sequence` is None, they are in `saved`, in host memory."""

    num_cells: int
    sequence: int | None
    saved: SavedState = b""
    read_at: int = 0


@dataclass(eq=False, slots=True)
class SequenceView:
    """A sequence with the cells that some rows see."""

    sequence: int
    runs: tuple[SlotRun, ...]
    """The slots that it shows, in order."""
    homes: set[Home] = field(default_factory=set)
    """Of these cells."""
    home: Home | None = None
    """Of the tokens that will be written through it."""
    num_rows: int = 0
    """How many these are."""
    owing: Home | None = None
    """The home with a pending tag of this view."""
    num_copied: int = 0
    """Cells of its own."""
    guard: int | None = None
    """A second sequence with these cells, where llama.cpp takes those of one for free once a window has passed them."""
    read_at: int = 0
    """Number of rows that had been computed when it was last taken."""


def joined_runs(runs: Iterable[SlotRun]) -> tuple[SlotRun, ...]:
    """Runs in order, neighbours that are read alike as one."""
    found: list[SlotRun] = []
    for run in runs:
        before = found[-1] if found else None
        if before is not None and before.first + before.num_tokens == run.first and before[2:] == run[2:]:
            found[-1] = before._replace(num_tokens=before.num_tokens + run.num_tokens)
        elif run.num_tokens:
            found.append(run)
    return tuple(found)


def overlap(runs: tuple[SlotRun, ...]) -> bool:
    """Whether any slot is seen twice at the same position."""
    ordered = sorted(runs, key=lambda run: (run.distance, run.label, run.first))
    return any(one.first + one.num_tokens > other.first and one[2:] == other[2:] for one, other in pairwise(ordered))


def spans_of(positions: Sequence[int], max_span: int) -> list[range]:
    """Indexes of positions, in order, cut where first and last would be further apart than allowed."""
    if max_span == UNLIMITED:
        return [range(len(positions))] if positions else []
    spans: list[range] = []
    low = high = 0
    for number, position in enumerate(positions):
        low, high = min(low, position), max(high, position)
        if spans and high - low < max_span:
            spans[-1] = range(spans[-1].start, number + 1)
        else:
            spans.append(range(number, number + 1))
            low = high = position
    return spans


def meets(run: SlotRun, slots: set[int]) -> bool:
    """Whether a run has any of these slots."""
    last = run.first + run.num_tokens
    if run.num_tokens > len(slots):
        return any(run.first <= slot < last for slot in slots)
    return any(slot in slots for slot in range(run.first, last))


NUM_SEQUENCES = 255
"""Sequences of a context: the most that llama.cpp allows, but one, which pads forwards."""


def why_unreadable(layout: Layout, window: int) -> str:
    """The reason, with the way out; empty when it can be read. Without windows everything can.

    Args:
        layout: of a prompt.
        window: tokens that a token sees in layers with a sliding window; 0: all.
    """
    if not window:
        return ""
    if text := later_tokens_seen(layout):
        return (
            f"{text}, which llama.cpp hides from models with sliding windows; use position_offsets that do not "
            "overlap, or engine='transformers'"
        )
    for span in layout.spans:
        seen = max((layout.spans[view.span].end + view.distance for view in span.views), default=span.start)
        if span.start - seen > window - 2:
            return (
                f"{span.segment.label} begins at position {span.start:,} and what it sees ends at {seen:,}: "
                f"{span.start - seen:,} positions are left empty, and this model allows {window - 2:,} in llama.cpp, "
                "less than its window; use a smaller position_offset, preamble='all', or engine='transformers'"
            )
    return ""
