"""Where bytes live."""

from kvmosaic.memory.budget import blocks_within, device_memory_bytes
from kvmosaic.memory.storage import BlockStorage, LayerShape

__all__ = ["BlockStorage", "LayerShape", "blocks_within", "device_memory_bytes"]
