"""Plugin statistics, in vLLM's log and on its /metrics."""

from __future__ import annotations

from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvmosaic.integrations.vllm.report import SHELF
from kvmosaic.integrations.vllm.report_counters import BY_NAME, FAMILIES, LABEL_VALUES, ReportCounters, merged, summary
from kvmosaic.metrics.family import Family


class ComposingStats(KVConnectorStats):
    """Counts of a `Tally`, from the scheduler or a worker to the front end."""

    @classmethod
    def taken_from(cls, tally: ReportCounters) -> ComposingStats | None:
        """Counts since the last call; None if there are none."""
        data = tally.take()
        return None if data is None else cls(data=data)

    def reset(self) -> None:
        """Resets all counts."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ComposingStats:
        """Merges both into a new one, since others may hold references to the old ones."""
        return ComposingStats(data=merged(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """One number for each count, for vLLM's log."""
        return summary(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data.get("counts") and not self.data.get("reports")


class ComposingPromMetrics(KVConnectorPromMetrics):
    """Prometheus families of the plugin, with vLLM's labels (model_name, engine) and their own."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = {"counter": metric_types[Counter], "gauge": metric_types[Gauge]}
        self._engines: dict[int, list[object]] = per_engine_labelvalues
        self._metrics = {family: _metric(kinds[family.kind], family, tuple(labelnames)) for family in FAMILIES}
        for family, metric in self._metrics.items():
            values: tuple[str, ...] = LABEL_VALUES.get(family, () if family.labels[1:] else ("",))
            for engine in self._engines.values():
                for value in values:
                    metric.labels(*engine, *filter(None, (value,)))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of a step, and stores its reports for the answers of this process."""
        engine = self._engines[engine_idx]
        for name, values in transfer_stats_data.get("counts", {}).items():
            if (family := BY_NAME.get(name)) is None:
                continue
            for value, number in values.items():
                series = self._metrics[family].labels(*engine, *filter(None, (value,)))
                if family.kind == "gauge":
                    series.set(number)
                else:
                    series.inc(number)
        for request_id, report in transfer_stats_data.get("reports", {}).items():
            SHELF.put(request_id, report)


@cache
def _metric(kind: Any, family: Family, labels: tuple[str, ...]) -> Any:
    """Created once per process, however many engines it runs in sequence: a name can be registered only once."""
    modes = {"multiprocess_mode": "mostrecent"} if family.kind == "gauge" else {}
    return kind(name=family.name, documentation=family.meaning, labelnames=[*labels, *family.labels[1:]], **modes)
