"""Metric families, each a name, a help text, labels and bounds equal to those of vLLM; and the meters that count."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics_text
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

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

_FAMILIES = tomllib.loads((Path(__file__).parent / "families.toml").read_text(encoding="utf-8"))


def family_named(name: str) -> Family:
    """The family of this name, as `families.toml` has it.

    All have the label of the model's name; vLLM's have the one of its engine, too, of which there is one: "0".
    """
    told = _FAMILIES[name]
    labels = ("model_name", "engine") if name.startswith("vllm:") else ("model_name",)
    buckets = globals()[told["buckets"]] if "buckets" in told else ()
    return Family(name, told["kind"], told["meaning"], (*labels, *told.get("labels", ())), buckets)


class Meters:
    """Counters and histograms of one server, in the given registry.

    A label that all series share, such as the model's name, is given once. A family without other labels exports its
    series, at zero, from the start, so that a rate over it is never empty. Thread-safe.
    """

    def __init__(
        self, registry: CollectorRegistry, families: Iterable[Family], constants: Mapping[str, str] | None = None
    ) -> None:
        self._constants = dict(constants or {})
        self._meters: dict[Family, Counter | Histogram] = {}
        for family in families:
            self._meters[family] = _meter(family, registry)
            if set(family.labels) <= set(self._constants):
                self._series(family, {})

    def add(self, family: Family, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter; `amount` must not be negative."""
        series = self._series(family, labels)
        assert isinstance(series, Counter)
        series.inc(amount)

    def observe(self, family: Family, value: float, **labels: str) -> None:
        """Adds one observation to a histogram."""
        series = self._series(family, labels)
        assert isinstance(series, Histogram)
        series.observe(value)

    def _series(self, family: Family, labels: Mapping[str, str]) -> Counter | Histogram:
        values = {**self._constants, **labels}
        return self._meters[family].labels(*(values[name] for name in family.labels))


def _meter(family: Family, registry: CollectorRegistry) -> Counter | Histogram:
    if family.kind == "counter":
        return Counter(family.name, family.meaning, family.labels, registry=registry)
    assert family.kind == "histogram", "gauges and summaries are read, not counted"
    return Histogram(family.name, family.meaning, family.labels, registry=registry, buckets=family.buckets)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a counter, gauge or summary."""

    family: Family
    value: float
    """For a summary: the sum."""
    labels: Mapping[str, str] = field(default_factory=dict)
    count: float = 0.0
    """For a summary: the number of observations."""


class SampleCollector(Collector):
    """Calls `read` for all values at every export; values of one family become one metric."""

    def __init__(self, read: Callable[[], Iterable[Sample]], constants: Mapping[str, str] | None = None) -> None:
        self._read = read
        self._constants = dict(constants or {})

    def collect(self) -> Iterator[Metric]:
        """The current metrics."""
        metrics: dict[Family, Metric] = {}
        for reading in self._read():
            family = reading.family
            if family not in metrics:
                metrics[family] = _metric(family)
            _add(metrics[family], reading, [{**self._constants, **reading.labels}[name] for name in family.labels])
        yield from metrics.values()


def _metric(family: Family) -> Metric:
    if family.kind == "counter":
        return CounterMetricFamily(family.name, family.meaning, labels=family.labels)
    if family.kind == "gauge":
        return GaugeMetricFamily(family.name, family.meaning, labels=family.labels)
    assert family.kind == "summary", "histograms are counted as things happen"
    return SummaryMetricFamily(family.name, family.meaning, labels=family.labels)


def _add(metric: Metric, reading: Sample, labels: list[str]) -> None:
    if isinstance(metric, SummaryMetricFamily):
        metric.add_metric(labels, count_value=int(reading.count), sum_value=reading.value)
    else:
        assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
        metric.add_metric(labels, reading.value)


OPENMETRICS = "application/openmetrics-text"


def expose(registry: CollectorRegistry, accept: str | None) -> tuple[bytes, str]:
    """Serializes a registry.

    Args:
        registry: the registry to export.
        accept: the Accept header of the request.

    Returns:
        The text, and its content type: OpenMetrics 1.0 if the header accepts it, else Prometheus' text format 0.0.4.
    """
    lasting = _Lasting(registry)
    if _wants_openmetrics(accept or ""):
        # the default would replace the colon of every name by an underscore
        text: bytes = openmetrics_text.generate_latest(lasting, ALLOWUTF8)  # type: ignore[no-untyped-call]
        return text, openmetrics_text.CONTENT_TYPE_LATEST
    return generate_latest(lasting), CONTENT_TYPE_PLAIN_0_0_4


class _Lasting(Collector):
    """A registry without the `_created` series, which would double the number of its series for one date each."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


def _wants_openmetrics(accept: str) -> bool:
    for accepted in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in accepted.split(";"))
        if kind == OPENMETRICS:
            return "q=0" not in parameters
    return False
