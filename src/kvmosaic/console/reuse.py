"""Terminal output of the cache reuse of a prompt: a coloured strip, one bar per segment, and a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from kvmosaic.console.text import duration_text, ends, printable, shrinking
from kvmosaic.sampling.reuse import ReuseReport, SegmentReuse

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

    @classmethod
    def of(cls, num_reused: int, num_computed: int, distance: int) -> Badge:
        """What happens to a segment."""
        (first, *rest) = bars_of("", num_reused, num_computed, distance)
        words = f"{first.num_tokens:,} reused, {rest[0].num_tokens:,} computed" if rest else first.action
        return cls(words, first.action)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws it in colours that the console has."""
        yield Text(f" {self.words} ", style=field_style(self.action, console.color_system))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Columns of the longest word and of all words."""
        return Measurement.get(console, options, Text(f" {self.words} "))


def _figures(bar: Bar) -> str:
    return f"{bar.num_tokens} {bar.distance:+d}" if bar.action == "moved" else str(bar.num_tokens)


MAX_ROWS = 24
"""Maximum rows of a table of segments; further ones are cut before the last."""


def reuse_strip(report: ReuseReport, has_legend: bool = True) -> Strip:
    """The prompt of a report; a partly reused segment is drawn as two bars."""
    bars = [
        bar
        for segment in report.segments
        for bar in bars_of(
            segment.name or segment.kind, segment.reused_tokens, segment.computed_tokens, segment.distance
        )
    ]
    return Strip(bars, has_legend)


def reuse_table(report: ReuseReport) -> RenderableType:
    """One row per segment, and one line about the whole prompt."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("segment", max_width=36)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("what happened", no_wrap=True)
    table.add_column("moved by", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    shown = ends(report.segments, MAX_ROWS)
    for segment in shown:
        if segment is shown[-1] and len(shown) < len(report.segments):
            table.add_row(*_middle(report.segments[MAX_ROWS - 1 : -1]), style="dim")
        table.add_row(
            shrinking(segment.name or segment.kind),
            f"{segment.num_tokens:,}",
            Badge.of(segment.reused_tokens, segment.computed_tokens, segment.distance),
            f"{segment.distance:+,}" if segment.reused_tokens and segment.distance else "",
            duration_text(segment.milliseconds / 1000),
        )
    repair = [str(report.repair)] if report.repair is not None else []
    notes = dict.fromkeys([*(segment.note for segment in report.segments), report.composition, *repair])
    remarks = [Text(printable(note), style="dim") for note in notes if note not in ("", "exact")]
    return Group(table, Text(reuse_sentence(report)), *remarks)


def reuse_sentence(report: ReuseReport) -> str:
    """The whole prompt in one line."""
    return (
        f"{report.reused_tokens:,} of {report.num_tokens:,} tokens reused ({report.reused_fraction:.0%}), "
        f"{report.computed_tokens:,} computed; first token after {duration_text(report.time_to_first_token)}"
    )


def _middle(segments: tuple[SegmentReuse, ...]) -> tuple[str, str, str]:
    """Returns one row for the omitted segments."""
    reused = sum(segment.reused_tokens for segment in segments)
    tokens = sum(segment.num_tokens for segment in segments)
    return f"… {len(segments):,} more", f"{tokens:,}", f" {reused:,} tokens reused "
