"""Benchmark plots: TTFT over cached documents and hit rate, memory over sharers, time over order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmosaic.bench.measurement import BenchRow
from kvmosaic.bench.peers.peer import OFF, OWN
from kvmosaic.bench.report import BenchReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
