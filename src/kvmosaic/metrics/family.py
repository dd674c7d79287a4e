"""Metric family: a name, a help text, the labels of its series, and bounds of histograms equal to those of vLLM."""

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


TIME_TO_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Seconds."""

INTER_TOKEN_LATENCY = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Seconds."""

REQUEST_LATENCY = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0),
    *(30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Seconds."""

NUM_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)

TOKENS = tuple(float(mantissa * 10**exponent) for exponent in range(7) for mantissa in (1, 2, 5))
"""1, 2, 5, 10, 20, 50, … 5,000,000. vLLM stops at the model's max prompt length; above it nothing is counted."""
