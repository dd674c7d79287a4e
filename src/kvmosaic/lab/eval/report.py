"""Report of an evaluation: JSON, Markdown, and tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvmosaic.console.text import duration_text, markdown_table, printable
from kvmosaic.lab.eval.case import Case
from kvmosaic.lab.eval.rows import Summary, TaskRow, findings, summarize
from kvmosaic.lab.eval.variants import Variant

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUMMARY_HEADINGS = (
    "strategy",
    "context",
    "repair",
    "accuracy",
    "of full",
    "worst task",
    "divergence",
    "agreement",
    "loss",
    "repaired",
    "work",
    "first token",
    "p90",
)
NARROW_HEADINGS = ("repair", "of full", "divergence", "agreement", "loss", "work", "first token")
ROW_HEADINGS = ("task", *SUMMARY_HEADINGS[:5], *SUMMARY_HEADINGS[6:], "cases")
LEGEND = (
    "accuracy: mean score over the questions, and over the tasks; of full: accuracy by that of full attention with the "
    "same model on the same questions; divergence: mean KL(full attention || this way) in nats, over the tokens of "
    "full attention's own answers; agreement: share of these tokens that it would choose, too; loss: of the accepted "
    "answer, in nats per token, and how far that is above full attention; repaired: share of the documents' tokens "
    "that were computed again; work: layers computed for choosing and repairing, 100% is what computing all documents "
    "once costs; first token: median over the questions, one at a time, documents known before (full attention "
    "computes them); p90: one in ten took longer"
)


def summary_cells(summary: Summary) -> tuple[str, ...]:
    """Cells of one variant, over all tasks."""
    worst = "–" if summary.worst_ratio is None else f"{summary.worst_task} {percent(summary.worst_ratio)}"
    return (
        *_way_cells(summary.way),
        percent(summary.accuracy),
        percent(summary.ratio),
        worst,
        *_nearness_cells(summary),
        percent(summary.repaired),
        percent(summary.work),
        duration_text(summary.first_median),
        duration_text(summary.first_p90),
    )


def narrow_cells(summary: Summary, *, with_context: bool) -> tuple[str, ...]:
    """The most important cells of one variant."""
    divergence, agreement, _ = _nearness_cells(summary)
    return (
        way_text(summary.way, with_context=with_context),
        "–" if summary.ratio is None else f"{summary.ratio:.0%}",
        divergence,
        agreement,
        increase(summary.loss_increase),
        f"{summary.work:.0%}",
        duration_text(summary.first_median),
    )


def row_cells(row: TaskRow) -> tuple[str, ...]:
    """Cells of one variant on one task."""
    return (
        row.task,
        *_way_cells(row.way),
        percent(row.accuracy),
        percent(row.ratio),
        *_nearness_cells(row),
        percent(row.repaired),
        percent(row.work),
        duration_text(row.first_median),
        duration_text(row.first_p90),
        str(row.num_cases),
    )


def task_table(rows: Sequence[TaskRow], *, with_context: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headings and cells of a table with a row per variant and a column per task, in whole percents."""
    tasks = list(dict.fromkeys(row.task for row in rows))
    accuracy = {(row.way, row.task): row.accuracy for row in rows}
    lines = [
        (way_text(way, with_context=with_context), *(_whole_percent(accuracy.get((way, task))) for task in tasks))
        for way in dict.fromkeys(row.way for row in rows)
    ]
    return ("accuracy", *tasks), lines


def _whole_percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def terminal_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """A table for a terminal."""
    table = Table(*map(printable, headings), box=None, pad_edge=False, header_style="dim")
    for line in lines:
        table.add_row(*map(printable, line))
    return table


def percent(share: float | None) -> str:
    """A share for people; a dash when it is unknown."""
    return "–" if share is None else f"{share:.1%}"


def increase(nats: float | None) -> str:
    """A change of the loss; a dash when it is unknown."""
    return "–" if nats is None else f"{nats:+.3f}"


def way_text(way: Variant, *, with_context: bool) -> str:
    """Returns a variant in a few words: "query(0.15), shared" or, with chunk context, "query(0.15), shared/none"."""
    if way.is_full:
        return "full attention"
    return f"{way.label}, {way.strategy}" + (f"/{way.context}" if with_context else "")


def _nearness_cells(found: Summary | TaskRow) -> tuple[str, str, str]:
    """Divergence, agreement and loss."""
    loss = "–" if found.loss is None else f"{found.loss:.3f} ({increase(found.loss_increase)})"
    if found.way.is_full:
        return "–", "–", "–" if found.loss is None else f"{found.loss:.3f}"
    return f"{found.divergence:.4f}", percent(found.agreement), loss


def _way_cells(way: Variant) -> tuple[str, str, str]:
    return ("–", "–", "full attention") if way.is_full else (way.strategy, way.context, way.label)


FORMAT = 2
"""Version of the JSON."""
MAX_SHOWN_CASES = 1_000
"""Cases whose documents are in the JSON; of later ones only question and answers are."""
_WIDE_COLUMNS = 140
"""Columns of a terminal from which on all headings have room."""


@dataclass(frozen=True, slots=True)
class EvalReport:
    """All results of one run."""

    model: str
    about: str
    """Number of parameters, dtype and device."""
    seed: int
    facts: dict[str, Any]
    cases: Sequence[Case]
    rows: Sequence[TaskRow]
    notes: Sequence[str]
    """Remarks for the reader: what was left out, and why."""
    seconds: float
    """How long the run took."""

    @property
    def summaries(self) -> list[Summary]:
        """Each variant, over all tasks."""
        return summarize(self.rows)

    def to_json(self) -> str:
        """Everything, with every answer."""
        content = {
            "format": FORMAT,
            "model": self.model,
            "about": self.about,
            "seed": self.seed,
            "machine": self.facts,
            "summaries": [summary.to_dict() for summary in self.summaries],
            "findings": findings(self.rows),
            "notes": list(self.notes),
            "rows": [row.to_dict() for row in self.rows],
            "cases": [_case(case, number < MAX_SHOWN_CASES) for number, case in enumerate(self.cases)],
            "seconds": self.seconds,
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    def to_markdown(self) -> str:
        """Tables for people."""
        parts = [
            f"# {self.model}: answers from cached documents beside full attention",
            self._heading(),
            *findings(self.rows),
            *self.notes,
            "## All tasks",
            markdown_table(SUMMARY_HEADINGS, map(summary_cells, self.summaries)),
            LEGEND[0].upper() + LEGEND[1:] + ".",
            "## Each task",
            markdown_table(ROW_HEADINGS, map(row_cells, self.rows)),
        ]
        return "\n\n".join(parts) + "\n"

    def to_tables(self, width: int = _WIDE_COLUMNS) -> Group:
        """Returns tables for a terminal of this many columns; a narrow one shows the most important columns."""
        said = [Text(printable(text)) for text in (*findings(self.rows), *self.notes)]
        with_context = len({row.way.context for row in self.rows}) > 1
        wide = terminal_table(SUMMARY_HEADINGS, map(summary_cells, self.summaries))
        cells = [narrow_cells(summary, with_context=with_context) for summary in self.summaries]
        return Group(
            Text(printable(self._heading()), style="dim"),
            Text(),
            terminal_table(NARROW_HEADINGS, cells) if width < _WIDE_COLUMNS else wide,
            Text(),
            terminal_table(*task_table(self.rows, with_context=with_context)),
            Text(),
            *said,
            Text("\n" + LEGEND, style="dim"),
        )

    def _heading(self) -> str:
        facts = self.facts
        return (
            f"{self.about}; {facts['processor']}, {facts['cores']} cores, {facts['threads']} thread(s), load average "
            f"{facts['load_average']}; {len(self.cases)} questions, seed {self.seed}; commit {facts['commit']}; "
            f"{self.seconds:.0f} s"
        )


def _case(case: Case, with_documents: bool) -> dict[str, Any]:
    fields = asdict(case)
    documents = [document.plain_text for document in case.documents]
    return fields | {"documents": documents if with_documents else len(documents)}


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The numbers of the points that no other point beats, by rising cost.

    gain
      |        o     x is on the front, o is beaten by a point that costs no more and gains no less
      |      x   o
      |  x
      |x    o
      +----------- cost

    Args:
        points: (cost, gain) of each.
    """
    order = sorted(range(len(points)), key=lambda number: (points[number][0], -points[number][1], number))
    front: list[int] = []
    for number in order:
        cost, gain = points[number]
        if not front or gain > points[front[-1]][1] or (cost, gain) == points[front[-1]]:
            front.append(number)
    return front


def save_plot(report: EvalReport, path: Path) -> Path:
    """Writes one point for each variant, over all tasks, as a PNG. Needs matplotlib.

    On the left divergence over work; on the right accuracy over time, if answers were scored.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    summaries = [summary for summary in report.summaries if not summary.way.is_turned]
    composed = [summary for summary in summaries if not summary.way.is_full] or summaries
    is_scored = any(summary.accuracy is not None for summary in summaries)
    figure = FigureCanvasAgg(Figure(figsize=(16.0 if is_scored else 8.0, 5.0), layout="constrained")).figure
    figure.suptitle(
        f"{report.model}: what is repaired, and how near that is to full attention\n{report.about}", size=10
    )
    near = [(100 * summary.work, summary.divergence) for summary in composed]
    axes = figure.add_subplot(1, 1 + is_scored, 1)
    _draw(axes, composed, near, pareto_front([(work, -divergence) for work, divergence in near]))
    axes.set(
        xlabel="work for choosing and repairing, % of computing all documents once",
        ylabel="divergence from full attention, nats per token",
    )
    if is_scored:
        right = [(1e3 * summary.first_median, 100 * (summary.accuracy or 0.0)) for summary in summaries]
        axes = figure.add_subplot(1, 2, 2)
        _draw(axes, summaries, right, pareto_front(right))
        axes.set(xlabel="time to the first token, ms (median, documents known before)", ylabel="accuracy, % (mean)")
    figure.savefig(path, dpi=130)
    return path


def _draw(
    axes: Axes, summaries: Sequence[Summary], points: Sequence[tuple[float, float]], front: Sequence[int]
) -> None:
    """Draws points with their policies, one colour for each place, and the Pareto front as a line."""
    named: dict[str, list[tuple[float, float]]] = {}
    for summary, point in zip(summaries, points, strict=True):
        way = summary.way
        named.setdefault("full attention" if way.is_full else f"{way.strategy}, {way.context}", []).append(point)
        axes.annotate(way.label, point, xytext=(4, 4), textcoords="offset points", fontsize=8)
    for name, own in named.items():
        axes.scatter([x for x, _ in own], [y for _, y in own], s=28, label=name, zorder=3)
    x, y = zip(*(points[number] for number in front), strict=True)
    axes.step(x, y, where="post", color="black", linewidth=0.8, label="Pareto front: no other is better on both axes")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
