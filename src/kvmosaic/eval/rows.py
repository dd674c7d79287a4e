"""What was measured: one reading for every question, and one row for every task and way of answering."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from statistics import fmean, median
from typing import Any

from kvmosaic.eval.case import Metric
from kvmosaic.eval.ways import Way


@dataclass(frozen=True, slots=True)
class Reading:
    """One answered question."""

    case: str
    """The id of its case."""
    answer: str
    score: float
    """From 0, wrong, to 1, right."""
    first_seconds: float
    """Time to the first token; the documents were known before."""
    computed_tokens: int
    """Tokens of the prompt that went through the model; for the documents, those that were repaired."""
    document_tokens: int
    repaired_tokens: int = 0
    """Of the documents' tokens, those that the answer read as they are when they see what stands before them."""
    work: float = 0.0
    """Layers computed for choosing and repairing, by the layers of all document tokens; see `RepairUse`."""
    repair_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One task answered in one way."""

    way: Way
    task: str
    metric: Metric
    readings: tuple[Reading, ...]
    full_accuracy: float
    """Of full attention, on the same questions with the same model."""

    @property
    def num_cases(self) -> int:
        """How many questions were asked."""
        return len(self.readings)

    @property
    def accuracy(self) -> float:
        """The mean score, from 0 to 1."""
        return fmean(reading.score for reading in self.readings)

    @property
    def ratio(self) -> float | None:
        """Accuracy by that of full attention; None where full attention answers nothing."""
        return self.accuracy / self.full_accuracy if self.full_accuracy else None

    @property
    def repaired(self) -> float:
        """Repaired tokens by all tokens of documents."""
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
        """Seconds to the first token: half of the questions took longer."""
        return median(reading.first_seconds for reading in self.readings)

    @property
    def first_p90(self) -> float:
        """Seconds to the first token: one question in ten took longer."""
        return percentile([reading.first_seconds for reading in self.readings], 0.9)

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON."""
        return {
            "task": self.task,
            "strategy": self.way.strategy,
            "context": self.way.context,
            "repair": self.way.repair,
            "is_full": self.way.is_full,
            "metric": self.metric,
            "cases": self.num_cases,
            "accuracy": self.accuracy,
            "full_accuracy": self.full_accuracy,
            "ratio": self.ratio,
            "repaired": self.repaired,
            "work": self.work,
            "first_median_seconds": self.first_median,
            "first_p90_seconds": self.first_p90,
            "answers": [[r.case, r.answer, r.score, r.first_seconds, r.repair_seconds] for r in self.readings],
        }


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of all values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)]
