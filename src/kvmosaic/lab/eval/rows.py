"""Measurements: a reading per question, a row per task and variant, and a summary of each variant over all tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from statistics import fmean, median
from typing import Any

from kvmosaic.errors import InvalidConfig
from kvmosaic.lab.eval.case import Case, Metric
from kvmosaic.lab.eval.variants import FULL, Variant

BUDGET = 0.15
"""Maximum share of document tokens that a policy within the budget repairs."""
AVERAGE_WANTED, TASK_WANTED = 0.98, 0.95
"""Target share of full attention's accuracy: on average, and on every task."""
_UNKNOWN, _MANY = 0.5, 100


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One answered question."""

    case: str
    """The id of its case."""
    answer: str
    """Empty if no answer was generated; see `ask`."""
    score: float | None
    """From 0, wrong, to 1, right; None for an unlabelled case."""
    first_seconds: float
    """TTFT, with the documents cached."""
    computed_tokens: int
    """Prompt tokens that went through the model; of documents, only the repaired ones."""
    document_tokens: int
    repaired_tokens: int = 0
    """Document tokens that the answer reads as computed with the preceding tokens visible."""
    work: float = 0.0
    """Layers computed for choosing and repairing / layers of all document tokens; see `RepairUse`."""
    repair_seconds: float = 0.0
    loss: float | None = None
    """Of the accepted answer, in nats per token; None for an unlabelled case."""
    divergence: float = 0.0
    """Mean KL(full attention || this variant) in nats, over the tokens of full attention's own answer."""
    agreement: float = 1.0
    """Share of these positions where the most likely token is that of full attention."""

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CaseResult:
        """A reading from names and values.

        Raises:
            InvalidConfig: names or values that a reading does not have.
        """
        try:
            reading = cls(**content)
            numbers = (reading.first_seconds, reading.work, reading.divergence, reading.agreement)
            counts = (reading.computed_tokens, reading.document_tokens, reading.repaired_tokens)
            is_sound = all(isinstance(value, int | float) and value >= 0 for value in (*numbers, *counts))
            known = (value for value in (reading.score, reading.loss) if value is not None)
            is_sound = is_sound and all(isinstance(value, int | float) for value in known)
        except TypeError:
            is_sound = False
        if not is_sound:
            raise InvalidConfig(f"this is no reading of an evaluation: {content!r:.200}")
        return reading


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task with one variant."""

    way: Variant
    task: str
    metric: Metric
    readings: tuple[CaseResult, ...]
    full_accuracy: float | None
    """Of full attention, on the same questions with the same model; None for unlabelled cases."""
    full_loss: float | None = None
    """Of the accepted answers, with full attention."""

    @property
    def num_cases(self) -> int:
        """How many questions were asked."""
        return len(self.readings)

    @property
    def accuracy(self) -> float | None:
        """The mean score, from 0 to 1; None if answers were not scored."""
        return _mean([reading.score for reading in self.readings])

    @property
    def ratio(self) -> float | None:
        """Accuracy / full attention's accuracy; None where full attention has none, or nothing was scored."""
        accuracy = self.accuracy
        return accuracy / self.full_accuracy if self.full_accuracy and accuracy is not None else None

    @property
    def loss(self) -> float | None:
        """Of the accepted answers, in nats per token: the mean over the questions; None for unlabelled cases."""
        return _mean([reading.loss for reading in self.readings])

    @property
    def loss_increase(self) -> float | None:
        """How far `loss` is above that of full attention."""
        loss = self.loss
        return None if loss is None or self.full_loss is None else loss - self.full_loss

    @property
    def divergence(self) -> float:
        """From full attention, in nats: the mean over the questions."""
        return fmean(reading.divergence for reading in self.readings)

    @property
    def agreement(self) -> float:
        """With full attention's greedy tokens: the mean over the questions."""
        return fmean(reading.agreement for reading in self.readings)

    @property
    def repaired(self) -> float:
        """Repaired tokens / all document tokens."""
        tokens = sum(reading.document_tokens for reading in self.readings)
        return sum(reading.repaired_tokens for reading in self.readings) / tokens if tokens else 0.0

    @property
    def work(self) -> float:
        """Work for choosing and repairing: 1 is what computing all documents once costs."""
        tokens = sum(reading.document_tokens for reading in self.readings)
        work = sum(reading.work * reading.document_tokens for reading in self.readings)
        return work / tokens if tokens else 0.0

    @property
    def first_median(self) -> float:
        """Median TTFT in seconds."""
        return median(reading.first_seconds for reading in self.readings)

    @property
    def first_p90(self) -> float:
        """90th percentile of the TTFT in seconds."""
        return percentile([reading.first_seconds for reading in self.readings], 0.9)

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return {
            "task": self.task,
            "strategy": self.way.strategy,
            "context": self.way.context,
            "repair": self.way.label,
            "is_full": self.way.is_full,
            "metric": self.metric,
            "cases": self.num_cases,
            "accuracy": self.accuracy,
            "full_accuracy": self.full_accuracy,
            "ratio": self.ratio,
            "divergence": self.divergence,
            "agreement": self.agreement,
            "loss": self.loss,
            "loss_increase": self.loss_increase,
            "repaired": self.repaired,
            "work": self.work,
            "first_median_seconds": self.first_median,
            "first_p90_seconds": self.first_p90,
            "answers": [reading.to_dict() for reading in self.readings],
        }


def rows_of(cases: Sequence[Case], found: Mapping[str, Mapping[Variant, CaseResult]]) -> tuple[TaskRow, ...]:
    """Returns rows of the finished cases, by task in the order of the cases, then by variant; full attention first.

    Args:
        cases: in their order.
        found: by id of a case, its readings.
    """
    rows = []
    complete = [case for case in cases if case.id in found]
    for task in dict.fromkeys(case.task for case in complete):
        own = [case for case in complete if case.task == task]
        full = [found[case.id][FULL] for case in own]
        accuracy, loss = _mean([reading.score for reading in full]), _mean([reading.loss for reading in full])
        rows += [
            TaskRow(way, task, own[0].metric, _readings_of(way, own, found), accuracy, loss)
            for way in dict.fromkeys(way for case in own for way in found[case.id])
        ]
    return tuple(rows)


def _readings_of(
    way: Variant, cases: Sequence[Case], found: Mapping[str, Mapping[Variant, CaseResult]]
) -> tuple[CaseResult, ...]:
    return tuple(found[case.id][way] for case in cases if way in found[case.id])


def _mean(values: list[float | None]) -> float | None:
    """Returns the mean, if all values are known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


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
    accuracy, full = _mean_of_known(row.accuracy for row in rows), _mean_of_known(row.full_accuracy for row in rows)
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
        _mean_of_known(row.loss for row in rows),
        _mean_of_known(row.loss_increase for row in rows),
    )


def _mean_of_known(values: Iterable[float | None]) -> float | None:
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
