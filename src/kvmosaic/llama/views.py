"""Views: which slots rows read, the sequences of llama.cpp that show them, and layouts that none can show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from kvmosaic.layout import Layout, later_tokens_seen
from kvmosaic.llama.state import SavedState

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
