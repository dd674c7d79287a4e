"""Meters: counters and histograms that are updated as events happen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvmosaic.metrics.family import Family


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
