"""Measurements: one reading per question, and one row per task and variant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from statistics import fmean, median
from typing import Any

from kvmosaic.errors import InvalidConfig
from kvmosaic.eval.case import Case, Metric
from kvmosaic.eval.variants import FULL, Variant


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
