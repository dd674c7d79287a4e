"""KV memory: block storage and its budget."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmosaic.memory.budget import blocks_within, check_fits, device_memory_bytes
    from kvmosaic.memory.storage import BlockStorage, ChunkTensors

__all__ = ["BlockStorage", "ChunkTensors", "blocks_within", "check_fits", "device_memory_bytes"]

# Names are imported on first use: the budget is read without torch.
_HOMES = {
    "budget": (
        "blocks_within",
        "check_fits",
        "device_memory_bytes",
    ),
    "storage": (
        "BlockStorage",
        "ChunkTensors",
    ),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'kvmosaic.memory' has no attribute {name!r}")
    return getattr(import_module(f"kvmosaic.memory.{home}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
