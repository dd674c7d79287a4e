"""ComposingConnector: scheduler side and worker side as one vLLM KV connector, and its statistics."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvmosaic.metrics.family import Family
from kvmosaic.vllm.operations import FetchReport, FingerprintReport, Operations, WorkerFacts
from kvmosaic.vllm.report_counters import BY_NAME, FAMILIES, LABEL_VALUES, ReportCounters, merged, summary
from kvmosaic.vllm.scheduler.scheduler_side import SchedulerSide
from kvmosaic.vllm.worker.composing_worker import ComposingWorker
from kvmosaic.vllm.worker.tier_side import WorkerTiers, open_worker_tiers


class ComposingStats(KVConnectorStats):
    """Counts of `ReportCounters`, from the scheduler or a worker to the front end."""

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
        return not self.data.get("counts")


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
        """Adds the counts of a step."""
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


@cache
def _metric(kind: Any, family: Family, labels: tuple[str, ...]) -> Any:
    """Created once per process, however many engines it runs in sequence: a name can be registered only once."""
    modes = {"multiprocess_mode": "mostrecent"} if family.kind == "gauge" else {}
    return kind(name=family.name, documentation=family.meaning, labelnames=[*labels, *family.labels[1:]], **modes)


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's operations, from the scheduler to the workers."""

    operations: Operations


@dataclass
class WorkerMetadata(KVConnectorHandshakeMetadata):
    """One worker's facts, from the worker to the scheduler."""

    facts: WorkerFacts


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """Reports of the workers after a step, to the scheduler."""

    reports: list[FetchReport | FingerprintReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """Merges the reports of both."""
        assert isinstance(other, StepReports)
        return StepReports(self.reports + other.reports)


class ComposingConnector(KVConnectorBase_V1, SupportsHMA):
    """Documents in any order inside vLLM: `--kv-transfer-config '{"kv_connector":"kvmosaic","kv_role":"kv_both"}'`.

    vLLM creates one in the scheduler's process, which plans (`scheduler/`), and one in every worker, which moves keys
    and values (`worker/`). This class only delegates.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._composer: SchedulerSide | None = None
        self._worker: ComposingWorker | None = None
        self._tiers: WorkerTiers | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._composer = SchedulerSide(vllm_config, kv_cache_config, calling_scheduler())
        else:
            self._worker = ComposingWorker(vllm_config, kv_cache_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache, lost entries are recomputed."""
        return False

    # Statistics, on both sides

    def get_kv_connector_stats(self) -> ComposingStats | None:
        """Counts since the last call."""
        half = self._composer or self._worker
        assert half is not None
        if self._tiers is not None:
            self._tiers.count(half.tally)
        return ComposingStats.taken_from(half.tally)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ComposingStats:
        """Rebuilds counts from another process."""
        return ComposingStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ComposingPromMetrics:
        """Creates the Prometheus metrics for /metrics."""
        return ComposingPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler side

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Handles the workers' facts, by (pipeline rank, tensor rank)."""
        self._on_handshake(metadata)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """The same by rank, for vLLM versions without pipeline ranks here."""
        self._on_handshake(metadata)

    def _on_handshake(self, metadata: dict[Any, Any]) -> None:
        """A MultiConnector passes on the metadata of one of its connectors to all of them."""
        ours = {rank: said.facts for rank, said in metadata.items() if isinstance(said, WorkerMetadata)}
        self._kv_cache.on_handshake(ours)

    def on_new_request(self, request: Any) -> None:
        """Handles a request that was added to the scheduler."""
        self._kv_cache.on_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Number of tokens that can be moved in; None while a chunk is being computed."""
        return self._kv_cache.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Handles the allocation of a request's blocks."""
        self._kv_cache.on_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Builds the operations of a scheduled step."""
        return StepMetadata(self._kv_cache.operations(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Handles the workers' reports after a step."""
        told = connector_output.kv_connector_worker_meta
        if self._kv_cache.tiering is not None and isinstance(told, StepReports):
            self._kv_cache.tiering.on_reports(told.reports)

    def take_events(self) -> Iterable[Any]:
        """No events of our own. vLLM asks after every step, when the blocks of finished requests are free."""
        self._kv_cache.step_complete()
        return ()

    def reset_cache(self) -> bool:
        """Handles a reset of the prefix cache; tier entries stay usable if the weights prove to be the same."""
        if self._kv_cache.tiering is not None:
            self._kv_cache.tiering.reset()
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Handles a finished request; its blocks are free at once, and its answer carries the report."""
        return False, self._kv_cache.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same for several KV cache groups."""
        return False, self._kv_cache.finished(request)

    @property
    def trouble(self) -> str:
        """Why no request is composed here; empty: they are."""
        return self._kv_cache.trouble

    @property
    def _kv_cache(self) -> SchedulerSide:
        assert self._composer is not None
        return self._composer

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Registers the paged caches."""
        self._mover.register(kv_caches)
        self._tiers = open_worker_tiers(self._vllm_config, self._mover.places)

    def get_handshake_metadata(self) -> WorkerMetadata:
        """The capabilities of this worker."""
        fingerprint = "" if self._tiers is None else self._tiers.fingerprint
        return WorkerMetadata(replace(self._mover.facts, fingerprint=fingerprint))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Begins a step."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.operations)

    def has_connector_metadata(self) -> bool:
        """False: layers then skip the calls before and after each attention, where there is nothing to do."""
        return False

    def clear_connector_metadata(self) -> None:
        """Ends a step."""
        super().clear_connector_metadata()
        if self._worker is not None:
            self._worker.end()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads, moves and repairs, before the step's forward."""
        if self._tiers is not None and isinstance(self._connector_metadata, StepMetadata):
            self._tiers.run(self._connector_metadata.operations)
        self._mover.run()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: all loads complete before the forward."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: the prefix cache keeps what is computed."""

    def wait_for_save(self) -> None:
        """Does nothing: some vLLM versions do not call it in every step."""

    def build_connector_worker_meta(self) -> StepReports | None:
        """After the forward: stores what it computed, and collects the worker's reports."""
        if self._tiers is None:
            return None
        if isinstance(self._connector_metadata, StepMetadata):
            self._tiers.save(self._connector_metadata.operations.stores)
        reports = self._tiers.told()
        return StepReports(reports) if reports else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded."""
        failed: set[int] = set()
        if isinstance(self._connector_metadata, StepMetadata):
            failed |= set(self._connector_metadata.operations.failed)
        if self._tiers is not None:
            failed |= self._tiers.failed_blocks
            self._tiers.failed_blocks = set()
        return failed

    def shutdown(self) -> None:
        """Shuts the worker side down."""
        if self._tiers is not None:
            self._tiers.close()

    @property
    def _mover(self) -> ComposingWorker:
        assert self._worker is not None
        return self._worker


def calling_scheduler() -> Any:
    """Returns the scheduler whose constructor is calling.

    vLLM creates a connector inside its scheduler, but passes it neither that scheduler nor any other way to request
    computation. So it is read from the call stack, and nothing in it is changed: only its public `add_request` and
    its cache manager are used.

    Raises:
        LookupError: no caller is a scheduler.
    """
    frame = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("self")
        if hasattr(candidate, "add_request") and hasattr(candidate, "schedule"):
            return candidate
        frame = frame.f_back  # type: ignore[assignment]
    raise LookupError("no scheduler is making this connector")
