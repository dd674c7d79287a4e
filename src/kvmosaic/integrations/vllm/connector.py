"""The two halves as one vLLM connector."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvmosaic.integrations.vllm.metrics import ComposingPromMetrics, ComposingStats
from kvmosaic.integrations.vllm.operations import FetchReport, FingerprintReport, Operations, WorkerFacts
from kvmosaic.integrations.vllm.scheduler.access import calling_scheduler
from kvmosaic.integrations.vllm.scheduler.scheduler_side import SchedulerSide
from kvmosaic.integrations.vllm.worker.composing_worker import ComposingWorker
from kvmosaic.integrations.vllm.worker.tiering import WorkerTiers, open_worker_tiers


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's operations, on their way to the workers."""

    operations: Operations


@dataclass
class WorkerMetadata(KVConnectorHandshakeMetadata):
    """One worker's facts, on their way to the scheduler."""

    facts: WorkerFacts


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """What workers tell after a step, on its way to the scheduler."""

    reports: list[FetchReport | FingerprintReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """Those of both."""
        assert isinstance(other, StepReports)
        return StepReports(self.reports + other.reports)


class ComposingConnector(KVConnectorBase_V1, SupportsHMA):
    """Documents in any order inside vLLM: `--kv-transfer-config '{"kv_connector":"kvmosaic","kv_role":"kv_both"}'`.

    vLLM makes one in the scheduler's process, which plans (`scheduler/`), and one in every worker, which moves keys and
    values (`worker/`). Everything here only passes on.
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
        """A cache: what is lost is computed again."""
        return False

    # Numbers, from both

    def get_kv_connector_stats(self) -> ComposingStats | None:
        """What was counted since the last time."""
        half = self._composer or self._worker
        assert half is not None
        if self._tiers is not None:
            self._tiers.count(half.tally)
        return ComposingStats.taken_from(half.tally)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ComposingStats:
        """Counts that come from another process."""
        return ComposingStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> ComposingPromMetrics:
        """What is added to /metrics."""
        return ComposingPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # The scheduler's process

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """What the workers found out, by (pipeline rank, tensor rank)."""
        self._kv_cache.on_handshake({rank: said.facts for rank, said in metadata.items()})

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """The same by rank, of versions of vLLM that know no pipeline here."""
        self._kv_cache.on_handshake({rank: said.facts for rank, said in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        """A request was added to the scheduler."""
        self._kv_cache.on_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens can be moved in; None while a chunk is being computed."""
        return self._kv_cache.match(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request was given blocks."""
        self._kv_cache.on_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """A step is scheduled."""
        return StepMetadata(self._kv_cache.operations(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """A step is over, and workers told something."""
        told = connector_output.kv_connector_worker_meta
        if self._kv_cache.tiering is not None and isinstance(told, StepReports):
            self._kv_cache.tiering.on_reports(told.reports)

    def reset_cache(self) -> bool:
        """What tiers have is of use again when the weights turn out to be the same."""
        if self._kv_cache.tiering is not None:
            self._kv_cache.tiering.reset()
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended; its blocks are free at once, and its answer carries the report."""
        return False, self._kv_cache.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same where layers are in groups."""
        return False, self._kv_cache.finished(request)

    @property
    def trouble(self) -> str:
        """Why nothing is composed here; empty: it is."""
        return self._kv_cache.trouble

    @property
    def _kv_cache(self) -> SchedulerSide:
        assert self._composer is not None
        return self._composer

    # A worker's process

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The paged caches are there."""
        self._mover.register(kv_caches)
        self._tiers = open_worker_tiers(self._vllm_config, self._mover.places)

    def get_handshake_metadata(self) -> WorkerMetadata:
        """What this worker can do."""
        fingerprint = "" if self._tiers is None else self._tiers.fingerprint
        return WorkerMetadata(replace(self._mover.facts, fingerprint=fingerprint))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(connector_metadata.operations)

    def has_connector_metadata(self) -> bool:
        """No: layers then do not call before and after each attention, where there is nothing to do."""
        return False

    def clear_connector_metadata(self) -> None:
        """A step is over."""
        super().clear_connector_metadata()
        if self._worker is not None:
            self._worker.end()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads, moves and repairs, before the step's forward."""
        if self._tiers is not None and isinstance(self._connector_metadata, StepMetadata):
            self._tiers.run(self._connector_metadata.operations)
        self._mover.run()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded behind the forward's back."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """The prefix cache keeps what is computed."""

    def wait_for_save(self) -> None:
        """Nothing is saved here, which is not called in every step by every version of vLLM."""

    def build_connector_worker_meta(self) -> StepReports | None:
        """The forward is over: what it computed is stored, and the worker tells what it has to."""
        if self._tiers is None:
            return None
        if isinstance(self._connector_metadata, StepMetadata):
            self._tiers.save(self._connector_metadata.operations.stores)
        reports = self._tiers.told()
        return StepReports(reports) if reports else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded."""
        if self._tiers is None:
            return set()
        failed, self._tiers.failed_blocks = self._tiers.failed_blocks, set()
        return failed

    def shutdown(self) -> None:
        """The worker ends."""
        if self._tiers is not None:
            self._tiers.close()

    @property
    def _mover(self) -> ComposingWorker:
        assert self._worker is not None
        return self._worker
