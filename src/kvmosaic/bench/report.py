"""Report of a campaign: JSON, Markdown, and tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvmosaic.bench.measurement import BenchRow, Spread
from kvmosaic.bench.models import Limits, TokenCost
from kvmosaic.bench.peers.peer import OWN
from kvmosaic.bench.sizes import Sizes
from kvmosaic.console.text import duration_text, markdown_table, printable, size_text

FORMAT = 2
"""Version of the JSON."""
_HEADINGS = (
    "workload",
    "engine",
    "dtype",
    "first token",
    "/ ours",
    "per token",
    "tokens/s",
    "CPU time",
    "computed",
    "of the limit",
    "KV held",
    "peak memory",
)
_NARROW_HEADINGS = ("workload", "engine", "first token", "/ ours", "per token", "computed")
_WIDE_COLUMNS = 140
"""Columns of a terminal from which on all headings have room."""
LEGEND = (
    "first token, per token: median, and in brackets the quarter and three quarters of the sorted values; / ours: the "
    "first token's time by kvmosaic's in the same workload and, if there is one, dtype; tokens/s: answered tokens by "
    "all time; CPU time: of the engine's process for a batch, median; computed: prompt tokens that went through the "
    "model, on average; of the limit: least possible time (multiplications of the linear layers or bytes to be read, "
    "measured here) by measured time, for the first and for later tokens; KV held: keys and values kept after a batch; "
    "peak memory: resident memory added by one batch at most"
)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All measurements of one run."""

    model: str
    preset: str
    seed: int
    machine: dict[str, Any]
    sizes: Sizes
    limits: Limits
    weights: dict[str, TokenCost]
    """By dtype."""
    rows: list[BenchRow]
    notes: list[str]
    """Remarks for the reader: omitted engines, reduced sizes."""
    seconds: float
    """How long the run took."""

    def to_json(self) -> str:
        """Everything, with every single time."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def to_markdown(self) -> str:
        """Tables for people."""
        parts = [f"# {self.model}: {self.preset} run", _heading(self), *self.notes]
        cells = [_cells(row, self.rows) for row in self.rows]
        parts += [markdown_table(_HEADINGS, cells), LEGEND[0].upper() + LEGEND[1:] + "."]
        return "\n\n".join(parts) + "\n"

    def to_tables(self, width: int = _WIDE_COLUMNS) -> Group:
        """Returns tables for a terminal of this many columns; a narrow one shows the most important columns."""
        is_narrow = width < _WIDE_COLUMNS
        rows = Table(*(_NARROW_HEADINGS if is_narrow else _HEADINGS), box=None, pad_edge=False, header_style="dim")
        before = ""
        for row in self.rows:
            cells = _narrow_cells(row, self.rows, len(self.weights) > 1) if is_narrow else _cells(row, self.rows)
            first, *others = map(printable, cells)
            rows.add_row(first if row.workload != before else "", *others)
            before = row.workload
        parts: list[Any] = [
            Text(_heading(self), style="dim"),
            *(Text(printable(note)) for note in self.notes),
            Text(),
            rows,
        ]
        legend = f"{LEGEND}; in {_WIDE_COLUMNS} columns or with --output all of it is shown" if is_narrow else LEGEND
        return Group(*parts, Text("\n" + legend, style="dim"))


def _heading(report: BenchReport) -> str:
    facts, sizes, limits = report.machine, report.sizes, report.limits
    weight = next(iter(report.weights.values()))
    reads = ", ".join(
        f"{rate / 1e9:.1f} GB/s with {count} thread{'s' if count > 1 else ''}"
        for count, rate in limits.read_bytes_per_second.items()
    )
    flops = ", ".join(f"{rate / 1e9:.0f} GFLOP/s in {dtype}" for dtype, rate in limits.flops_per_second.items())
    return (
        f"{weight.num_parameters / 1e6:.0f} M parameters; {facts['processor']}, {facts['cores']} cores, "
        f"{facts['threads']} thread(s), load average {facts['load_average']}; reads {reads}, {flops}; system "
        f"{sizes.system}, {sizes.documents} documents of {sizes.document_tokens}, question {sizes.question}; "
        f"commit {facts['commit']}; {report.seconds:.0f} s"
    )


def _times_ours(row: BenchRow, rows: Sequence[BenchRow]) -> str:
    """The first token's time by that of our engine in the same workload; in the same dtype, if it was measured."""
    own = [each for each in rows if each.workload == row.workload and each.peer == OWN]
    same = [each for each in own if each.dtype == row.dtype] or own
    ours = [each.first.median for each in same if each.first]
    return "–" if row.first is None or not ours or row.peer == OWN else f"{row.first.median / min(ours):.3g}x"


def _cells(row: BenchRow, rows: Sequence[BenchRow]) -> tuple[str, ...]:
    computed = f"{sum(row.num_computed) / len(row.num_computed):.0f}" if row.num_computed else "–"
    shares = [
        f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"
        for share in (row.first_share, row.token_share)
        if share is not None
    ]
    return (
        row.workload,
        row.peer,
        row.dtype,
        _spread_text(row.first),
        _times_ours(row, rows),
        _spread_text(row.token),
        f"{row.tokens_per_second:.1f}",
        duration_text(row.cpu.median if row.cpu else None),
        computed,
        " / ".join(shares) or "–",
        "–" if row.kv_bytes is None else size_text(row.kv_bytes),
        "–" if row.peak_bytes is None else size_text(row.peak_bytes),
    )


def _narrow_cells(row: BenchRow, rows: Sequence[BenchRow], has_dtypes: bool) -> tuple[str, ...]:
    workload, engine, dtype, _, ratio, _, _, _, computed, *_ = _cells(row, rows)
    first, token = (duration_text(spread.median if spread else None) for spread in (row.first, row.token))
    engine = engine.replace("chunk cache off", "cache off")
    return workload, f"{engine}, {dtype}" if has_dtypes else engine, first, ratio, token, computed


def _spread_text(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    return f"{duration_text(spread.median)} ({duration_text(spread.low)}–{duration_text(spread.high)})"
