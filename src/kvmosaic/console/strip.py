"""A composed prompt as a coloured strip: one bar per segment, as wide as it has tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from kvmosaic.console.text import ends, printable

Action = Literal["reused", "moved", "computed"]

COLOURS: dict[str, str] = {"reused": "#86b86b", "moved": "#62aadb", "computed": "#e3b04b"}
"""One colour per action, in the strip and in the tables."""
_MARKS = {"reused": "=", "moved": "→", "computed": "+"}
"""One sign per action, for eyes that do not tell the colours apart."""
_PATTERNS = {"reused": "█", "moved": "▓", "computed": "░"}
"""One pattern per action, for terminals and files without colour."""
_NARROWEST = (12, 11, 10, 9)
"""Columns of the shortest segment, best first: room for the beginning of a name."""
_MOST_BARS = 48


@dataclass(frozen=True, slots=True)
class Bar:
    """One segment of the strip."""

    label: str
    num_tokens: int
    action: Action
    distance: int = 0
    """How far the segment is moved from where it was computed."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Segments in prompt order, drawn as wide as the console and wrapped when there are many.

    With colours a bar is a coloured field with its name inside; without colours the name stands above a pattern:

        = system → ferry             + kiln      + question
        ████████ ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ ░░░░░░░░░░░ ░░░░░░░░░░
        12       84 +131             40          9
    """

    bars: Sequence[Bar]
    has_legend: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the rows of bars and the legend."""
        has_colour = console.color_system is not None and not console.no_color
        bars = ends(self.bars, _MOST_BARS)
        widths = bar_widths([bar.num_tokens for bar in bars], options.max_width)
        for row in _rows(list(zip(bars, widths, strict=True)), options.max_width):
            names = [f"{_MARKS[bar.action]} {printable(bar.label)}" for bar, _ in row]
            if has_colour:
                yield _line(row, [f" {name}" for name in names], [field(bar.action) for bar, _ in row])
            else:
                yield _line(row, names)
                yield _line(row, [_PATTERNS[bar.action] * (width - 1) for bar, width in row])
            yield _line(row, [" " * has_colour + _figures(bar) for bar, _ in row], ["dim"] * len(row))
        if len(bars) < len(self.bars):
            yield Text(f"{len(self.bars) - len(bars):,} segments before the last one are not drawn", style="dim")
        if self.has_legend:
            yield legend(has_colour)


def legend(has_colour: bool) -> Text:
    """What the colours, signs and patterns of a strip mean."""
    parts = []
    for action, mark in _MARKS.items():
        sample = (f" {mark} ", field(action)) if has_colour else f"{_PATTERNS[action] * 2} {mark}"
        parts.append(Text.assemble(sample, f" {action}"))
    return Text("   ").join([*parts, Text("below: tokens and distance", style="dim")])


def bar_widths(tokens: Sequence[int], width: int) -> list[int]:
    """Columns for segments of these lengths: in proportion, never below the narrowest, one row if they all fit in one.

    When even the narrowest bars do not fit into one row, every segment gets the narrowest and the strip wraps.
    """
    narrowest = next((columns for columns in _NARROWEST if len(tokens) * columns <= width), None)
    if narrowest is None:
        return [min(_NARROWEST[0], width)] * len(tokens)
    spare, total = width - len(tokens) * narrowest, sum(tokens)
    return [narrowest + spare * count // total for count in tokens]


def _rows(bars: list[tuple[Bar, int]], width: int) -> Iterator[list[tuple[Bar, int]]]:
    row: list[tuple[Bar, int]] = []
    for bar in bars:
        if row and sum(columns for _, columns in row) + bar[1] > width:
            yield row
            row = []
        row.append(bar)
    if row:
        yield row


def _line(row: list[tuple[Bar, int]], contents: list[str], styles: list[str] | None = None) -> Text:
    line = Text(no_wrap=True, overflow="crop")
    for (_, width), content, style in zip(row, contents, styles or [""] * len(row), strict=True):
        cell = Text(content, style=style)
        cell.truncate(width - 1, overflow="ellipsis", pad=True)
        line.append_text(cell).append(" ")
    line.right_crop(1)
    return line


def field(action: str) -> str:
    """The style of a coloured field, for the strip and for the tables."""
    return f"#101010 on {COLOURS[action]}"


def _figures(bar: Bar) -> str:
    return f"{bar.num_tokens} {bar.distance:+d}" if bar.action == "moved" else str(bar.num_tokens)
