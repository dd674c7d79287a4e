"""A worker's half: does what the scheduler planned for a step, before the step's forward."""

from __future__ import annotations

import logging
from typing import Any

from kvmosaic.integrations.vllm.operations import Operations, WorkerFacts

_log = logging.getLogger(__name__)


class ComposingWorker:
    """Moves, repairs and shifts of one worker's share of the model."""

    def __init__(self, config: Any, kv_cache_config: Any) -> None:
        self._config, self._kv_cache_config = config, kv_cache_config
        self._operations = Operations()
        self.facts = WorkerFacts(trouble="the KV cache is not there yet")

    def register(self, kv_caches: dict[str, Any]) -> None:
        """Finds out where keys and values lie and how they are turned."""
        from kvmosaic.integrations.vllm.worker._simple import SimpleMover

        self._mover = SimpleMover(self._config, kv_caches)
        self.facts = WorkerFacts()

    def begin(self, operations: Operations) -> None:
        """A step begins."""
        self._operations = operations

    def run(self) -> None:
        """Moves and repairs of this step; called once, before its forward or (with nothing to do) after it."""
        operations, self._operations = self._operations, Operations()
        if operations.moves:
            self._mover.move(operations.moves)

    def end(self) -> None:
        """A step is over."""
        self._operations = Operations()
