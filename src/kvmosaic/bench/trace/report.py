"""Report of a replay: JSON, Markdown, tables for a terminal and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvmosaic.bench.trace.replay import ReplayRow
from kvmosaic.bench.trace.simulation import NAME as CLAIRVOYANT
from kvmosaic.bench.trace.simulation import UNLIMITED
from kvmosaic.console.text import duration_text, markdown_table, printable

FORMAT = 1
"""Version of the JSON."""
_SIMULATED = ("documents see", "cache", "documents reused", "prompts saved", "evicted", "time")
_SERVED = ("documents see", "documents reused", "points off", "prompts saved", "points off", "time")
_UNBROKEN = ("documents see", "cache")
_SERVED_HEADING = "Served, and by how many points that differs from the simulation of the same requests:"
_LEGEND = (
    "documents reused: share of the documents' tokens that was cached; prompts saved: share of all prompt "
    "tokens that was not computed; cache: for documents, as a share of all different "
    "ones; evicted: chunks. Where the trace has no documents, cache and evicted count prefix blocks"
)


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A replay by an engine or server, beside the simulation of the same requests at full size."""

    served: ReplayRow
    simulated: ReplayRow

    @property
    def points(self) -> tuple[float, float]:
        """Difference in points, of documents and of prompts."""
        return (
            100 * (self.served.document_share - self.simulated.document_share),
            100 * (self.served.prompt_share - self.simulated.prompt_share),
        )

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON; without curves, which are those of the simulation."""
        documents, prompts = self.points
        return {
            **self.served.to_dict(),
            "simulated_document_share": round(self.simulated.document_share, 5),
            "simulated_prompt_share": round(self.simulated.prompt_share, 5),
            "document_points": round(documents, 2),
            "prompt_points": round(prompts, 2),
            "curve": [],
        }


@dataclass(frozen=True, slots=True)
class TraceReport:
    """All figures of one run."""

    trace: dict[str, Any]
    options: dict[str, Any]
    machine: dict[str, Any]
    rows: list[ReplayRow]
    served: list[ServedRow]
    notes: list[str]
    seconds: float

    @property
    def name(self) -> str:
        """Name of its files."""
        return f"trace-{self.trace['name']}"

    def to_json(self) -> str:
        """Everything, with the curves."""
        content = {
            "format": FORMAT,
            "trace": self.trace,
            "options": self.options,
            "machine": self.machine,
            "rows": [row.to_dict() for row in self.rows],
            "served": [row.to_dict() for row in self.served],
            "notes": self.notes,
            "seconds": self.seconds,
        }
        return json.dumps(content).replace('{"variant"', '\n{"variant"') + "\n"

    def to_markdown(self) -> str:
        """Tables for people."""
        parts = [f"# Replay of {self.trace['name']}", self._heading(), *self.notes]
        if self.rows:
            parts.append(markdown_table(_SIMULATED, [_cells(row) for row in self.rows]))
        if self.served:
            parts += [_SERVED_HEADING, markdown_table(_SERVED, [_served_cells(row) for row in self.served])]
        return "\n\n".join([*parts, _LEGEND[0].upper() + _LEGEND[1:] + "."]) + "\n"

    def to_tables(self) -> Group:
        """Tables for a terminal."""
        parts: list[Any] = [Text(printable(self._heading()), style="dim")]
        parts += [Text(printable(note)) for note in self.notes]
        if self.rows:
            parts += [Text(), _table(_SIMULATED, [_cells(row) for row in self.rows])]
        if self.served:
            parts += [Text(f"\n{_SERVED_HEADING}\n")]
            parts += [_table(_SERVED, [_served_cells(row) for row in self.served])]
        return Group(*parts, Text("\n" + _LEGEND, style="dim"))

    def _heading(self) -> str:
        trace, options = self.trace, self.options
        documents = (
            f", {trace['document_tokens']:,} of them in documents ({trace['distinct_documents']:,} different ones of "
            f"{trace['distinct_document_tokens']:,} tokens)"
            if trace["document_tokens"]
            else "; it does not tell documents from other text"
        )
        served = (
            f"; {options['served_requests']:,} requests served by {options['served_by']}, {options['block_tokens']} "
            "words per block of 512 tokens"
        )
        return (
            f"{trace['requests']:,} requests in the format of {trace['format']}, {trace['prompt_tokens']:,} prompt "
            f"tokens{documents}{served if self.served else ''}; `{options['command']}`; commit "
            f"{self.machine['commit']}; {self.seconds:.0f} s"
        )


def save_plot(report: TraceReport, folder: Path) -> list[Path]:
    """Writes the curves of the simulation as PNG. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    rows = [row for row in report.rows if row.curve]
    if not rows:
        return []
    has_documents = bool(report.trace["document_tokens"])
    canvas = FigureCanvasAgg(Figure(figsize=(12.0 if has_documents else 7.0, 4.2), layout="constrained"))
    figures = (("documents reused", 1),) if has_documents else ()
    for place, (label, column) in enumerate((*figures, ("prompts saved", 2)), 1):
        axes = canvas.figure.add_subplot(1, len(figures) + 1, place)
        for index, row in enumerate(rows):
            is_limited = row.cache != UNLIMITED
            line = f"{row.variant}, {row.cache}" if is_limited else row.variant
            x, y = zip(*((point[0], point[column]) for point in row.curve), strict=True)
            axes.plot(x, y, color=f"C{index % 10}", linestyle="--" if is_limited else "-", label=line)
        axes.set(xlabel="requests so far", ylabel=label, ylim=(0, 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.grid(alpha=0.3)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    lines, labels = canvas.figure.axes[0].get_legend_handles_labels()
    canvas.figure.legend(lines, labels, fontsize=8, loc="outside right center")
    canvas.figure.suptitle(f"Replay of {report.trace['name']}, {report.trace['requests']:,} requests", fontsize=10)
    path = folder / f"{report.name}.png"
    canvas.figure.savefig(path, dpi=130)
    return [path]


def _cells(row: ReplayRow) -> tuple[str, ...]:
    return (
        row.about + ("" if row.is_complete else f" (first {row.num_requests:,})"),
        row.cache,
        f"{row.document_share:.1%}" if row.document_tokens else "–",
        f"{row.prompt_share:.1%}" if row.variant != CLAIRVOYANT else "–",
        f"{row.evictions:,}",
        duration_text(row.seconds) if row.seconds else "–",
    )


def _served_cells(row: ServedRow) -> tuple[str, ...]:
    served = row.served
    documents, prompts = row.points
    has_documents = bool(served.document_tokens)
    return (
        served.about + ("" if served.is_complete else f" (first {served.num_requests:,})"),
        f"{served.document_share:.1%}" if has_documents else "–",
        _points_text(documents) if has_documents else "–",
        f"{served.prompt_share:.1%}",
        _points_text(prompts),
        duration_text(served.seconds),
    )


def _points_text(points: float) -> str:
    return f"{round(points, 1) + 0.0:+.1f}"  # no negative zero


def _table(headings: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=heading in _UNBROKEN)
    for cells in rows:
        table.add_row(*map(printable, cells))
    return table
