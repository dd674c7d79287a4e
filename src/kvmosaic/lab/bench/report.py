"""Report of a campaign: JSON, Markdown, and tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvmosaic.console.text import duration_text, markdown_table, printable, size_text
from kvmosaic.lab.bench.measurement import BenchRow, Spread
from kvmosaic.lab.bench.models import Limits, TokenCost
from kvmosaic.lab.bench.peers import OFF, OWN
from kvmosaic.lab.bench.sizes import Sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


_WIDTH, _HEIGHT = 7.0, 4.2


def save_plots(report: BenchReport, folder: Path, name: str) -> list[Path]:
    """Writes one PNG per figure that has rows, and returns their paths. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = []
    for title, figure, draw in _FIGURES:
        rows = [row for row in report.rows if row.figure == figure and row.first is not None]
        if not rows:
            continue
        canvas = FigureCanvasAgg(Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained"))
        axes = canvas.figure.add_subplot()
        draw(axes, rows, report)
        axes.set_title(f"{title}\n{report.model}, {report.machine['threads']} threads", fontsize=10)
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        path = folder / f"{name}-{figure.replace(' ', '-')}.png"
        canvas.figure.savefig(path, dpi=130)
        paths.append(path)
    return paths


def _whole(value: float, position: float | None = None) -> str:
    """Formats a number on an axis, without powers of ten; small ones with one decimal."""
    return f"{value:,.0f}" if value >= 10 or value == round(value) else f"{value:.1f}"


def _lines(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    """Rows of one engine and dtype, by place on the plot."""
    is_mixed = len({row.dtype for row in rows}) > 1
    lines: dict[str, list[BenchRow]] = {}
    for row in sorted(rows, key=lambda row: row.x):
        lines.setdefault(f"{row.peer}, {row.dtype}" if is_mixed else row.peer, []).append(row)
    return lines


def _by_documents(axes: Axes, rows: list[BenchRow], report: BenchReport) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    for label, line in _lines(rows).items():
        spreads = [row.first for row in line if row.first is not None]
        x = [row.x for row in line]
        low, middle, high = zip(*((1e3 * s.low, 1e3 * s.median, 1e3 * s.high) for s in spreads), strict=True)
        axes.plot(x, middle, marker="o", label=label)
        axes.fill_between(x, low, high, alpha=0.15)
    bare = [row.first.median for row in report.rows if row.workload == "question" and row.is_ours and row.first]
    if bare:
        axes.axhline(1e3 * min(bare), linestyle=":", color="black", label="the bare question")
    axes.set(xlabel=f"known documents, of {report.sizes.documents}", ylabel="first token, ms", yscale="log")
    axes.set_xticks(sorted({row.x for row in rows}))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(_whole)
    axes.legend(fontsize=8)


def _by_hit_rate(axes: Axes, rows: list[BenchRow], report: BenchReport) -> None:
    """Speedup over the chunk cache off, and 1 / (1 - hit rate x share of the time that a hit saves)."""
    for dtype in dict.fromkeys(row.dtype for row in rows):
        off, on = ([row for row in rows if row.peer == peer and row.dtype == dtype] for peer in (OFF, OWN))
        cold = {row.x: row.first.mean for row in off if row.first}
        points = sorted((row.x, cold[row.x] / row.first.mean) for row in on if row.first and row.x in cold)
        (line,) = axes.plot(*zip(*points, strict=True), marker="o", label=f"measured, {dtype}") if points else (None,)
        saved = saved_share(report.rows, dtype)
        if saved is not None and line is not None:
            x = [step / 100 for step in range(100)]
            label = f"1 / (1 - αβ) with β = {saved:.3f}"
            axes.plot(x, [1 / (1 - hit * saved) for hit in x], linestyle="--", color=line.get_color(), label=label)
    axes.set(xlabel="α: share of documents that are known", ylabel="first token: chunk cache off by on")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def saved_share(rows: Sequence[BenchRow], dtype: str) -> float | None:
    """Returns β: the share of a new-document prompt's time that is saved when all documents are cached."""
    ours = {
        row.x: row.first.mean
        for row in rows
        if row.figure == "hit rate" and row.is_ours and row.dtype == dtype and row.first
    }
    if 0.0 not in ours or 1.0 not in ours:
        return None
    return max(0.0, 1 - ours[1.0] / ours[0.0])


def _by_sharers(axes: Axes, rows: list[BenchRow], report: BenchReport) -> None:
    for kind in ("shared", "private"):
        for label, line in _lines([row for row in rows if row.workload.startswith(kind)]).items():
            held = [(row.kv_bytes or 0) / 2**20 for row in line]
            axes.plot([row.x for row in line], held, marker="o", label=f"documents {kind} ({label})")
    axes.set(xlabel="prompts at once over the same documents", ylabel="keys and values held, MiB")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row.x for row in rows}))
    axes.xaxis.set_major_formatter(_whole)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


def _by_order(axes: Axes, rows: list[BenchRow], report: BenchReport) -> None:
    for label, line in _lines(rows).items():
        for row in line:
            axes.plot([1e3 * seconds for seconds in row.first_seconds], linewidth=0.8, label=label)
    axes.set(xlabel="number of the order", ylabel="first token, ms")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)


_FIGURES: tuple[tuple[str, str, Callable[[Any, list[BenchRow], BenchReport], None]], ...] = (
    ("Time to the first token by number of known documents", "documents", _by_documents),
    ("Speedup by hit rate, and the model beside it", "hit rate", _by_hit_rate),
    ("Memory by number of sharers", "sharers", _by_sharers),
    ("Known documents in orders not seen before", "orders", _by_order),
)
