"""Chunk source: the tensors of a chunk that is to be stored, copied as late as possible."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvmosaic.memory import ChunkTensors


class ChunkSource:
    """What a chunk holds: in its blocks, as long as these are its own, and in a copy from then on.

        complete ──▶ in its blocks ──┬── the writer takes it up ──▶ copied, on the thread of the writer
                                     ├── its blocks are given back ──▶ copied before that, on the thread of the engine
                                     └── it is deleted ──▶ dropped

    Blocks of a complete chunk are never written again, so any thread may read them. Before they are given back, the
    engine calls `tensors` or `drop`, which wait for a copy that is being made.
    """

    def __init__(self, read: Callable[[], ChunkTensors]) -> None:
        """Calls `read` once, when the tensors are first asked for, on the thread that does."""
        self._read: Callable[[], ChunkTensors] | None = read
        self._tensors: ChunkTensors | None = None
        self._lock = threading.Lock()

    def tensors(self) -> ChunkTensors | None:
        """The tensors, copied if they were not yet; None if the chunk was dropped before."""
        with self._lock:
            if self._read is not None:
                self._tensors = self._read()
                self._read = None
            return self._tensors

    def drop(self) -> None:
        """Lets go of it: the chunk was deleted."""
        with self._lock:
            self._read = self._tensors = None
