"""Report of a campaign: JSON, Markdown, and tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvmosaic.bench.limits import Limits
from kvmosaic.bench.markdown import markdown_table
from kvmosaic.bench.measurement import BenchRow, Spread
from kvmosaic.bench.models import TokenCost
from kvmosaic.bench.profile import StepParts
from kvmosaic.bench.sizes import Sizes
from kvmosaic.bench.targets import Target
from kvmosaic.console.text import duration_text, printable, size_text

FORMAT = 1
"""Version of the JSON."""
_HEADINGS = (
    "workload",
    "engine",
    "dtype",
    "first token",
    "per token",
    "tokens/s",
    "CPU time",
    "computed",
    "of the limit",
    "KV held",
    "peak memory",
)
_NARROW_HEADINGS = ("workload", "engine", "first token", "per token", "computed", "of the limit")
_WIDE_COLUMNS = 140
"""Columns of a terminal from which on all headings have room."""
LEGEND = (
    "first token, per token: median, and in brackets the quarter and three quarters of the sorted values; tokens/s: "
    "answered tokens by all time; CPU time: of the engine's process for a batch, median; computed: prompt tokens that "
    "went through the model, on average; of the limit: least possible time (multiplications of the linear layers or "
    "bytes to be read, measured here) by measured time, for the first and for later tokens; KV held: keys and values "
    "kept after a batch; peak memory: resident memory added by one batch at most"
)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All measurements of one run."""

    model: str
    preset: str
    seed: int
    facts: dict[str, Any]
    sizes: Sizes
    limits: Limits
    weights: dict[str, TokenCost]
    """By dtype."""
    rows: list[BenchRow]
    parts: list[StepParts]
    targets: list[Target]
    notes: list[str]
    """Remarks for the reader: omitted engines, reduced sizes."""
    seconds: float
    """How long the run took."""

    def to_json(self) -> str:
        """Everything, with every single time."""
        content = {
            "format": FORMAT,
            "model": self.model,
            "preset": self.preset,
            "seed": self.seed,
            "machine": self.facts,
            "sizes": asdict(self.sizes),
            "limits": self.limits.to_dict(),
            "weights": {dtype: asdict(weight) for dtype, weight in self.weights.items()},
            "rows": [row.to_dict() for row in self.rows],
            "step_parts": [asdict(part) for part in self.parts],
            "targets": [{**asdict(target), "is_reached": target.is_reached} for target in self.targets],
            "notes": self.notes,
            "seconds": self.seconds,
        }
        return json.dumps(content, indent=1) + "\n"

    def to_markdown(self) -> str:
        """Tables for people."""
        parts = [f"# {self.model}: {self.preset} run", _heading(self), *self.notes]
        if self.targets:
            parts.append(markdown_table(("target", "wanted", "measured", "reached"), _target_cells(self.targets)))
        parts += [markdown_table(_HEADINGS, [_cells(row) for row in self.rows]), LEGEND[0].upper() + LEGEND[1:] + "."]
        return "\n\n".join(parts) + "\n"

    def to_tables(self, width: int = _WIDE_COLUMNS) -> Group:
        """Returns tables for a terminal of this many columns; a narrow one shows the most important columns."""
        is_narrow = width < _WIDE_COLUMNS
        rows = Table(*(_NARROW_HEADINGS if is_narrow else _HEADINGS), box=None, pad_edge=False, header_style="dim")
        before = ""
        for row in self.rows:
            cells = _narrow_cells(row, len(self.weights) > 1) if is_narrow else _cells(row)
            first, *others = map(printable, cells)
            rows.add_row(first if row.workload != before else "", *others)
            before = row.workload
        parts: list[Any] = [
            Text(_heading(self), style="dim"),
            *(Text(printable(note)) for note in self.notes),
            Text(),
            rows,
        ]
        if self.targets:
            wanted = Table("target", "wanted", "measured", "reached", box=None, pad_edge=False, header_style="dim")
            for cells in _target_cells(self.targets):
                wanted.add_row(*cells)
            parts += [Text(), wanted]
        legend = f"{LEGEND}; in {_WIDE_COLUMNS} columns or with --output all of it is shown" if is_narrow else LEGEND
        return Group(*parts, Text("\n" + legend, style="dim"))

    def save(self, folder: Path, name: str) -> list[Path]:
        """Writes JSON and Markdown, and returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.json", folder / f"{name}.md"]
        for path, text in zip(paths, (self.to_json(), self.to_markdown()), strict=True):
            path.write_text(text, encoding="utf-8")
        return paths


def _heading(report: BenchReport) -> str:
    facts, sizes, limits = report.facts, report.sizes, report.limits
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


def _cells(row: BenchRow) -> tuple[str, ...]:
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
        _spread_text(row.token),
        f"{row.tokens_per_second:.1f}",
        duration_text(row.cpu.median if row.cpu else None),
        computed,
        " / ".join(shares) or "–",
        "–" if row.kv_bytes is None else size_text(row.kv_bytes),
        "–" if row.peak_bytes is None else size_text(row.peak_bytes),
    )


def _narrow_cells(row: BenchRow, has_dtypes: bool) -> tuple[str, ...]:
    workload, engine, dtype, _, _, _, _, computed, limit, _, _ = _cells(row)
    first, token = (duration_text(spread.median if spread else None) for spread in (row.first, row.token))
    engine = engine.replace("chunk cache off", "cache off")
    return workload, f"{engine}, {dtype}" if has_dtypes else engine, first, token, computed, limit


def _spread_text(spread: Spread | None) -> str:
    if spread is None:
        return "–"
    return f"{duration_text(spread.median)} ({duration_text(spread.low)}–{duration_text(spread.high)})"


def _target_cells(targets: Sequence[Target]) -> list[tuple[str, ...]]:
    return [
        (
            target.what,
            f"{'at most' if target.is_most else 'at least'} {target.wanted:g}{target.unit}",
            f"{target.measured:.3g}{target.unit}",
            "yes" if target.is_reached else "no",
        )
        for target in targets
    ]
