"""Times and statistics over several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from kvmosaic.console.text import duration_text, one_line, size_text

if TYPE_CHECKING:
    from kvmosaic.cache import ChunkCacheStats
    from kvmosaic.sampling import ReuseReport


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one question took."""

    question: str
    reuse: ReuseReport
    cold_seconds: float
    """Time to first token when nothing is cached."""


def times_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per question: tokens, what was reused, and the time to the first token without and with the cache."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("question", no_wrap=True, overflow="ellipsis", max_width=34)
    for heading in ("tokens", "reused", "cold", "with cache", "faster"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        seconds = outcome.reuse.time_to_first_token
        table.add_row(
            one_line(outcome.question),
            f"{outcome.reuse.num_tokens:,}",
            f"{outcome.reuse.reused_fraction:.0%}",
            duration_text(outcome.cold_seconds),
            duration_text(seconds),
            f"{outcome.cold_seconds / seconds:.1f}x" if seconds else "",
        )
    table.caption = "time to the first token"
    return table


def statistics_table(statistics: ChunkCacheStats, bytes_per_block: int) -> Table:
    """The chunk cache after the last question."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    used_bytes = statistics.used_blocks * bytes_per_block
    for name, value in (
        ("chunk lookups", f"{statistics.lookups}: {statistics.hits} hits, {statistics.misses} misses"),
        ("hit rate", f"{statistics.hit_rate:.0%}"),
        ("chunks cached", f"{statistics.cached_chunks}, in {statistics.used_blocks} blocks ({size_text(used_bytes)})"),
        ("evictions", str(statistics.evictions)),
        ("average lookup", duration_text(statistics.average_lookup_ms / 1000)),
        ("average attach", duration_text(statistics.average_attach_ms / 1000)),
        ("average compute", duration_text(statistics.average_compute_ms / 1000)),
    ):
        table.add_row(name, value)
    return table
