"""Summary of rows: each variant over all tasks, and what a small repair budget reaches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from kvmosaic.eval.rows import TaskRow, percentile
from kvmosaic.eval.variants import Variant

BUDGET = 0.15
"""Maximum share of document tokens that a policy within the budget repairs."""
AVERAGE_WANTED, TASK_WANTED = 0.98, 0.95
"""Target share of full attention's accuracy: on average, and on every task."""
_UNKNOWN, _MANY = 0.5, 100


@dataclass(frozen=True, slots=True)
class Summary:
    """One variant, over all tasks."""

    way: Variant
    accuracy: float | None
    """The mean over the tasks whose answers are known and were scored; None if there are none."""
    ratio: float | None
    """`accuracy` / full attention's accuracy; None if full attention has none."""
    worst_task: str
    """The task with the minimum ratio; "" without ratios."""
    worst_ratio: float | None
    repaired: float
    work: float
    first_median: float
    first_p90: float
    divergence: float = 0.0
    """From full attention, in nats per token: the mean over the tasks."""
    agreement: float = 1.0
    """With full attention's greedy tokens: the mean over the tasks."""
    loss: float | None = None
    """Of the accepted answers, in nats per token: the mean over the tasks where they are known."""
    loss_increase: float | None = None
    """How far that is above full attention."""

    @property
    def is_in_budget(self) -> bool:
        """Whether at most `BUDGET` of the documents' tokens were repaired. Full attention never is."""
        return not self.way.is_full and self.repaired <= BUDGET

    @property
    def is_good(self) -> bool:
        """Whether it reaches the targets."""
        ratio, worst = self.ratio, self.worst_ratio
        return ratio is not None and worst is not None and ratio >= AVERAGE_WANTED and worst >= TASK_WANTED

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return {**asdict(self), "is_in_budget": self.is_in_budget, "is_good": self.is_good}


def summarize(rows: Sequence[TaskRow]) -> list[Summary]:
    """Returns one summary per variant, in the order of the rows."""
    return [_summary(way, [row for row in rows if row.way == way]) for way in dict.fromkeys(row.way for row in rows)]


def _summary(way: Variant, rows: list[TaskRow]) -> Summary:
    accuracy, full = _mean(row.accuracy for row in rows), _mean(row.full_accuracy for row in rows)
    worst = min((row for row in rows if row.ratio is not None), key=lambda row: row.ratio or 0.0, default=None)
    readings = [reading for row in rows for reading in row.readings]
    tokens = sum(reading.document_tokens for reading in readings)
    firsts = [reading.first_seconds for reading in readings]
    return Summary(
        way,
        accuracy,
        accuracy / full if full and accuracy is not None else None,
        worst.task if worst else "",
        worst.ratio if worst else None,
        sum(reading.repaired_tokens for reading in readings) / tokens,
        sum(reading.work * reading.document_tokens for reading in readings) / tokens,
        median(firsts),
        percentile(firsts, 0.9),
        fmean(row.divergence for row in rows),
        fmean(row.agreement for row in rows),
        _mean(row.loss for row in rows),
        _mean(row.loss_increase for row in rows),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the known values."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def findings(rows: Sequence[TaskRow]) -> list[str]:
    """Returns sentences: what the best policies within the budget reach, which tasks miss the targets, and doubts."""
    summaries = summarize(rows)
    nearest = min((each for each in summaries if each.is_in_budget), key=lambda each: each.divergence, default=None)
    within = [summary for summary in summaries if summary.is_in_budget and summary.ratio is not None]
    said = similar_text(rows)
    if (other := next((each for each in summaries if each.way.is_turned), None)) is not None:
        said.append(f"The yardstick, read in full with the first document last: {nearness_text(other)}.")
    if within:
        best = min(within, key=_preference)
        assert best.ratio is not None and best.worst_ratio is not None
        reached = "reaches" if best.is_good else "misses"
        said.append(
            f"With at most {BUDGET:.0%} of the documents' tokens repaired, {best.way} is best: {best.ratio:.1%} of "
            f"full attention on average, {best.worst_ratio:.1%} on its worst task ({best.worst_task}). It {reached} "
            f"{AVERAGE_WANTED:.0%} on average with no task below {TASK_WANTED:.0%}."
        )
        said += _missed(rows, best, [summary.way for summary in within])
    if nearest is not None:
        said.append(f"Nearest to full attention with so few is {nearest.way}: {nearness_text(nearest)}.")
    return [*said, *doubts(rows)]


def similar_text(rows: Sequence[TaskRow]) -> list[str]:
    """Right answers among similar records, of full attention and of every variant: one sentence for each such task."""
    said = []
    for task in dict.fromkeys(row.task for row in rows if row.metric == "only"):
        own = [row for row in rows if row.task == task and row.accuracy is not None and not row.way.is_turned]
        rights = [f"{row.way} {sum(reading.score == 1 for reading in row.readings)}" for row in own]
        if own:
            said.append(f"Right answers among similar records ({task}), of {own[0].num_cases}: {'; '.join(rights)}.")
    return said


def nearness_text(summary: Summary) -> str:
    """Describes how near a variant is to full attention."""
    text = f"divergence {summary.divergence:.4f} nats, {summary.agreement:.1%} of its greedy tokens the same"
    if summary.loss_increase is not None:
        text += f", loss of the accepted answer {summary.loss_increase:+.3f} nats"
    return text


def doubts(rows: Sequence[TaskRow]) -> list[str]:
    """Returns sentences: why the numbers may be unreliable."""
    said = []
    fewest = min((row.num_cases for row in rows), default=0)
    if 0 < fewest < _MANY:
        said.append(
            f"With {fewest} questions of a task, one of them is {1 / fewest:.1%} of its accuracy: ask more (--cases) "
            "before you rely on small differences."
        )
    known = {row.task: row.full_accuracy for row in rows if row.full_accuracy is not None}
    unknown = {task: accuracy for task, accuracy in known.items() if accuracy < _UNKNOWN}
    said += [
        f"Full attention itself answers only {accuracy:.0%} of {name}: the model has not learned it, and ratios there "
        "say little."
        for name, accuracy in unknown.items()
    ]
    return said


def _preference(summary: Summary) -> tuple[bool, float, float, float]:
    """Sort key: good ones first, by least work; then the others, by best average."""
    ratio, worst = summary.ratio or 0.0, summary.worst_ratio or 0.0
    return (False, summary.work, -ratio, -worst) if summary.is_good else (True, -ratio, -worst, summary.work)


def _missed(rows: Sequence[TaskRow], best: Summary, ways: list[Variant]) -> list[str]:
    said = []
    for row in rows:
        if row.way == best.way and row.ratio is not None and row.ratio < TASK_WANTED:
            others = [other for other in rows if other.task == row.task and other.way in ways]
            top = max(others, key=lambda other: other.accuracy or 0.0)
            said.append(
                f"{row.task} is below {TASK_WANTED:.0%} with it: {row.accuracy:.1%} right, {row.ratio:.1%} of full "
                f"attention ({row.full_accuracy:.1%}). The best reached there in this budget is {top.ratio:.1%}, "
                f"by {top.way}."
            )
    return said
