"""Terminal output of the cache reuse of a prompt: strip and table."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvmosaic.console.strip import Badge, Strip, bars_of
from kvmosaic.console.text import duration_text, ends, printable, shrinking
from kvmosaic.sampling.reuse import ReuseReport, SegmentReuse

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
            _field(segment),
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


def _field(segment: SegmentReuse) -> Badge:
    (first, *rest) = bars_of("", segment.reused_tokens, segment.computed_tokens, segment.distance)
    words = f"{first.num_tokens:,} reused, {rest[0].num_tokens:,} computed" if rest else first.action
    return Badge(words, first.action)
