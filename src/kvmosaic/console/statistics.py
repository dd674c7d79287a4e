"""Terminal output of times and cache statistics over several prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from kvmosaic.console.text import duration_text, shrinking, size_text

if TYPE_CHECKING:
    from kvmosaic.cache import ChunkCacheStats


TIMES_NOTE = (
    "cold: an ordinary prompt, its documents joined, with nothing remembered; "
    "warm: composed from cached documents, in an order not asked before"
)


@dataclass(frozen=True, slots=True)
class VisitTimes:
    """Times of one question."""

    question: str
    num_tokens: int
    cold_seconds: float
    """TTFT of an ordinary prompt, its documents joined, with an empty cache."""
    warm_seconds: float
    """TTFT with every document cached, in a new order."""


def times_table(times: Sequence[VisitTimes]) -> Table:
    """One row per question: the time to the first token with nothing cached and with the documents cached."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("first token of the answer to", max_width=44)
    for heading in ("tokens", "cold", "warm", "faster"):
        table.add_column(heading, justify="right", no_wrap=True)
    for visit in times:
        table.add_row(
            shrinking(visit.question),
            f"{visit.num_tokens:,}",
            duration_text(visit.cold_seconds),
            duration_text(visit.warm_seconds),
            f"{visit.cold_seconds / visit.warm_seconds:.1f}x",
        )
    return table


def statistics_table(statistics: ChunkCacheStats, bytes_per_block: int) -> Table:
    """Returns a table of the chunk cache after the last question."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    used_bytes = statistics.used_blocks * bytes_per_block
    for name, value in (
        ("chunk lookups", f"{statistics.lookups}: {statistics.hits} hits, {statistics.misses} misses"),
        ("hit rate", f"{statistics.hit_rate:.0%}"),
        ("chunks cached", f"{statistics.cached_chunks}, in {statistics.used_blocks} blocks ({size_text(used_bytes)})"),
        ("evictions", str(statistics.evictions)),
        ("average lookup", duration_text(statistics.average_lookup_ms / 1000)),
        ("average allocate (whole prompt)", duration_text(statistics.average_allocate_ms / 1000)),
        ("average compute", duration_text(statistics.average_compute_ms / 1000)),
    ):
        table.add_row(name, value)
    return table
