"""KV memory: block storage and its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.memory.budget import blocks_within, check_fits, device_memory_bytes
    from kvmosaic.memory.storage import BlockStorage, ChunkTensors

__all__ = ["BlockStorage", "ChunkTensors", "blocks_within", "check_fits", "device_memory_bytes"]

# Names are imported on first use: the budget is read without torch.
_HOMES = {
    "budget": ("blocks_within", "check_fits", "device_memory_bytes"),
    "storage": ("BlockStorage", "ChunkTensors"),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
