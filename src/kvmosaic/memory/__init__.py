"""KV memory: block storage and its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.memory.storage import (
        BlockStorage,
        ChunkTensors,
        blocks_within,
        check_fits,
        device_memory_bytes,
        free_memory_bytes,
    )

__all__ = [
    "BlockStorage",
    "ChunkTensors",
    "blocks_within",
    "check_fits",
    "device_memory_bytes",
    "free_memory_bytes",
]

# Names are imported on first use: host buffers need no block storage.
_HOMES = {
    "storage": (
        "BlockStorage",
        "ChunkTensors",
        "blocks_within",
        "check_fits",
        "device_memory_bytes",
        "free_memory_bytes",
    ),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
