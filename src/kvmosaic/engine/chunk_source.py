"""Chunk source: the tensors of a chunk that is being stored, copied as late as possible."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvmosaic.memory import ChunkTensors


class ChunkSource:
    """Tensors of a chunk: read from its blocks while these are its own, from a copy afterwards.

        complete ──▶ in its blocks ──┬── the writer reads it ──▶ copied, on the writer's thread
                                     ├── its blocks are about to be freed ──▶ copied first, on the engine's thread
                                     └── it is deleted ──▶ dropped

    Blocks of a complete chunk are never written again, so any thread may read them. Before they are freed, the engine
    calls `tensors` or `drop`, which wait for a copy in progress.
    """

    def __init__(self, read: Callable[[], ChunkTensors]) -> None:
        """Calls `read` once, on the first thread that asks for the tensors."""
        self._read: Callable[[], ChunkTensors] | None = read
        self._tensors: ChunkTensors | None = None
        self._lock = threading.Lock()

    def tensors(self) -> ChunkTensors | None:
        """The tensors, copied on the first call; None if the chunk was dropped before."""
        with self._lock:
            if self._read is not None:
                self._tensors = self._read()
                self._read = None
            return self._tensors

    def drop(self) -> None:
        """Releases the tensors: the chunk was deleted."""
        with self._lock:
            self._read = self._tensors = None
