"""Exposition of a metrics registry, as Prometheus text or as OpenMetrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics_text
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

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
