"""Metric family: a name, a help text, and the labels of its series."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "summary"]

_SUFFIXES: dict[Kind, tuple[str, ...]] = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_sum", "_count"),
    "summary": ("_sum", "_count"),
}


@dataclass(frozen=True, slots=True)
class Family:
    """One metric, as in Prometheus' data model.

        Family("kvmosaic:chunk_hits", "counter", "Chunks found.", ("model_name",))
            kvmosaic:chunk_hits_total{model_name="reader"} 41

    A counter is named without its `_total`. Label values must come from a bounded set.
    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without infinity."""

    @property
    def series(self) -> tuple[str, ...]:
        """The series names for queries."""
        return tuple(self.name + suffix for suffix in _SUFFIXES[self.kind])
