"""Readings: values that are read at every export, such as gauges and the engine's own counters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from kvmosaic.metrics.family import Family


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
