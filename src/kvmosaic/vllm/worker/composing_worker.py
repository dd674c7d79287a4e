"""Worker side of the connector: runs a step's operations before its forward."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from kvmosaic.errors import KVMosaicError
from kvmosaic.vllm.operations import Operations, WorkerFacts
from kvmosaic.vllm.report_counters import ReportCounters
from kvmosaic.vllm.settings import document_reads
from kvmosaic.vllm.worker import position_shift
from kvmosaic.vllm.worker.extra_forward import (
    ExtraForward,
    Repairer,
    Scope,
    can_run,
    make_forward,
    scope_at_start,
)
from kvmosaic.vllm.worker.in_place.reader import DocumentReader, document_reader
from kvmosaic.vllm.worker.in_place.trial import check_reading
from kvmosaic.vllm.worker.kv_layout import KVLayout, Mover
from kvmosaic.vllm.worker.position_shift import PositionShift
from kvmosaic.vllm.worker.self_check import StartCheck, check_at_start

_log = logging.getLogger(__name__)


class ComposingWorker:
    """Moves, repairs and shifts of one worker's share of the model.

    register    once: finds the KV layout, the key rotation, and this worker's capabilities (`facts`)
    begin       takes a step's operations; positions are shifted from now on
    run         moves, then repairs, then returns: before the step's forward
    end         ends the step
    """

    def __init__(self, config: Any, kv_cache_config: Any) -> None:
        self._config, self._kv_cache_config = config, kv_cache_config
        self._operations = Operations()
        self._mover: Mover | None = None
        self._repairer: Repairer | None = None
        self._shift: PositionShift | None = None
        self._reader: DocumentReader | None = None
        self.tally = ReportCounters()
        self.start_check = StartCheck("", "")
        self.facts = WorkerFacts(trouble="the KV cache is not there yet")

    @property
    def configuration(self) -> tuple[Any, Any]:
        """The configuration of vLLM, and that of its cache."""
        return self._config, self._kv_cache_config

    @property
    def reader(self) -> DocumentReader | None:
        """Reads documents in place; None: they are copied."""
        return self._reader

    @property
    def places(self) -> KVLayout | None:
        """Layout of keys and values; None: unknown."""
        return None if self._mover is None else self._mover.places

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Finds the KV layout and the key rotation; failures become facts."""
        try:
            places = KVLayout.of(self._config, kv_caches, self._kv_cache_config)
        except KVMosaicError as error:
            self.facts = WorkerFacts(trouble=str(error))
            return
        except Exception as error:  # vLLM must start, without composing, whatever its parts raise
            self.facts = WorkerFacts(trouble=f"its cache could not be tried: {type(error).__name__}: {error}"[:400])
            return
        no_repair = can_run(self._config, self._kv_cache_config)
        forward = make_forward(self._config, self._kv_cache_config, places.root)
        scope = scope_at_start(self._config, self._kv_cache_config)
        self.start_check = check_at_start(places, forward, scope, int(self._config.model_config.max_model_len))
        if self.start_check.trouble:
            self.facts = WorkerFacts(trouble=self.start_check.trouble)
            return
        if isinstance(forward, str):
            no_repair = no_repair or forward
        elif not no_repair:
            self._repairer = Repairer(forward)
        self._mover = Mover(places)
        if not (no_shift := position_shift.can_shift(self._config, self._kv_cache_config, places.root)):
            self._shift = PositionShift(places.root, places.block_size)
        whole = forward if scope >= Scope.MODEL and not isinstance(forward, str) else None
        no_reading = self._find_reader(places, whole)
        for what, reason in (("repair", no_repair), ("shared positions", no_shift)):
            if reason:
                _log.info("kvmosaic: no %s here: %s", what, reason)
        self.facts = WorkerFacts(
            can_repair=not no_repair,
            can_shift=not no_shift,
            can_read_in_place=self._reader is not None,
            no_reading=no_reading,
            num_positions=places.num_positions,
            cache_format=places.cache_format,
        )
        if no_reading:
            _log.warning("kvmosaic: documents are copied into requests, not read in place: %s", no_reading)

    def _find_reader(self, places: KVLayout, forward: ExtraForward | None) -> str:
        """Finds the reader of documents in place if they are to be read so; returns why there is none."""
        if document_reads(os.environ) == "copy":
            return ""
        if no_shift := position_shift.can_shift(self._config, self._kv_cache_config, places.root, by_vllm=False):
            return f"positions cannot be shifted: {no_shift}"
        reader = document_reader(places, is_replayed=position_shift.may_replay(self._config))
        if isinstance(reader, str):
            return reader
        if trouble := check_reading(places, reader, forward):
            return trouble
        self._reader = reader
        return ""

    def begin(self, operations: Operations) -> None:
        """Begins a step."""
        self._operations = operations
        if not operations.repairs:  # these run at their own positions
            self._begin_shifts(operations)

    def run(self) -> None:
        """Moves and repairs of this step; called once, before its forward or (with nothing to do) after it."""
        operations, self._operations = self._operations, Operations()
        if operations.moves:
            assert self._mover is not None
            began = time.perf_counter()
            self._mover.move(operations.moves)
            self.tally.moved(0, time.perf_counter() - began)
        if operations.repairs:
            assert self._repairer is not None
            self._repairer.run(operations.repairs)
            if operations.returns:
                assert self._mover is not None
                self._mover.move(operations.returns)
            self._begin_shifts(operations)

    def end(self) -> None:
        """Ends a step."""
        self._operations = Operations()
        if self._shift is not None:
            self._shift.end()
        if self._reader is not None:
            self._reader.end()

    def _begin_shifts(self, operations: Operations) -> None:
        if operations.shifts:
            assert self._shift is not None
            self._shift.begin(operations.shifts)
        if operations.in_place:
            assert self._reader is not None
            self._reader.begin(operations.in_place)
