"""Chunk source: the tensors of a chunk that is to be stored, copied as late as possible."""

from __future__ import annotations

import threading

from kvmosaic.cache import Chunk
from kvmosaic.memory import BlockStorage, ChunkTensors


class ChunkSource:
    """What a chunk holds: in its blocks, as long as these are its own, and in a copy from then on.

        complete ──▶ in its blocks ──┬── the writer takes it up ──▶ copied, on the thread of the writer
                                     ├── its blocks are given back ──▶ copied before that, on the thread of the engine
                                     └── it is deleted ──▶ dropped

    Blocks of a complete chunk are never written again, so any thread may read them. Before they are given back, the
    engine calls `tensors` or `drop`, which wait for a copy that is being made.
    """

    def __init__(self, storage: BlockStorage | None, chunk: Chunk | None, tensors: ChunkTensors | None = None) -> None:
        self._storage = storage
        self._place = None if chunk is None else (tuple(chunk.block_ids), chunk.num_tokens)
        self._tensors = tensors
        self._lock = threading.Lock()

    @classmethod
    def of(cls, tensors: ChunkTensors) -> ChunkSource:
        """What came from a tier."""
        return cls(None, None, tensors)

    def tensors(self) -> ChunkTensors | None:
        """The tensors, copied if they were not yet; None if the chunk was dropped before."""
        with self._lock:
            if self._tensors is None and self._storage is not None and self._place is not None:
                self._tensors = self._storage.read_chunk(*self._place)
            self._storage = self._place = None
            return self._tensors

    def drop(self) -> None:
        """Lets go of it: the chunk was deleted."""
        with self._lock:
            self._storage = self._place = self._tensors = None
