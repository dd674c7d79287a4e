"""Coloured strip of a composed prompt: one bar per segment, as wide as its number of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from kvmosaic.console.text import ends, printable

Action = Literal["reused", "moved", "computed"]

_STYLES = {"reused": "#101010 on #86b86b", "moved": "#101010 on #62aadb", "computed": "#101010 on #e3b04b"}
"""One colour per action, in the strip and in the tables."""
_STYLES_OF_16 = {"reused": "black on green", "moved": "bright_white on blue", "computed": "black on yellow"}
"""The same for terminals with 16 colours, which would show the nearest to two of the others as one."""
_MARKS = {"reused": "=", "moved": "→", "computed": "+"}
"""One sign per action, for readers who cannot distinguish the colours."""
_PATTERNS = {"reused": "█", "moved": "▓", "computed": "░"}
"""One pattern per action, for terminals and files without colour."""
_NARROWEST = (12, 11, 10, 9)
"""Columns of the shortest segment, best first: room for the beginning of a name."""
_MAX_BARS = 48


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

    With colours a bar is a coloured field with its name inside; without colours the name is above a pattern:

        = system → ferry             + kiln      + question
        ████████ ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓ ░░░░░░░░░░░ ░░░░░░░░░░
        12       84 +131             40          9
    """

    bars: Sequence[Bar]
    has_legend: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws the rows of bars and the legend."""
        has_colour = console.color_system is not None and not console.no_color
        bars = ends(self.bars, _MAX_BARS)
        widths = bar_widths([bar.num_tokens for bar in bars], options.max_width)
        for row in _rows(list(zip(bars, widths, strict=True)), options.max_width):
            names = [f"{_MARKS[bar.action]} {printable(bar.label)}" for bar, _ in row]
            if has_colour:
                styles = [field_style(bar.action, console.color_system) for bar, _ in row]
                yield _line(row, [f" {name}" for name in names], styles)
            else:
                yield _line(row, names)
                yield _line(row, [_PATTERNS[bar.action] * (width - 1) for bar, width in row])
            yield _line(row, [" " * has_colour + _figures(bar) for bar, _ in row], ["dim"] * len(row))
        if len(bars) < len(self.bars):
            yield Text(f"{len(self.bars) - len(bars):,} segments before the last one are not drawn", style="dim")
        if self.has_legend:
            yield from legend(None if console.no_color else console.color_system, options.max_width)


def legend(color_system: str | None, width: int) -> list[Text]:
    """What the colours, signs and patterns of a strip mean, on one line or two."""
    parts = []
    for action, mark in _MARKS.items():
        sample = (f" {mark} ", field_style(action, color_system)) if color_system else f"{_PATTERNS[action] * 2} {mark}"
        parts.append(Text.assemble(sample, f" {action}"))
    note = Text("below: tokens and distance", style="dim")
    line = Text("   ").join([*parts, note])
    return [line] if line.cell_len <= width else [Text("   ").join(parts), note]


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


def field_style(action: str, color_system: str | None) -> str:
    """The style of a coloured field on a terminal with these colours."""
    return (_STYLES_OF_16 if color_system in ("standard", "windows") else _STYLES)[action]


def bars_of(label: str, num_reused: int, num_computed: int, distance: int) -> list[Bar]:
    """A segment as bars: one, or two when it is reused in part."""
    bars = [Bar(label, num_reused, "moved" if distance else "reused", distance)] if num_reused else []
    return bars + ([Bar(label, num_computed, "computed")] if num_computed else [])


@dataclass(frozen=True, slots=True)
class Badge:
    """A few words in a coloured field, for the tables."""

    words: str
    action: Action

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it in colours that the console has."""
        yield Text(f" {self.words} ", style=field_style(self.action, console.color_system))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Columns of the longest word and of all words."""
        return Measurement.get(console, options, Text(f" {self.words} "))


def _figures(bar: Bar) -> str:
    return f"{bar.num_tokens} {bar.distance:+d}" if bar.action == "moved" else str(bar.num_tokens)
