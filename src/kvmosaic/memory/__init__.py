"""Where bytes live."""

from kvmosaic.memory.budget import blocks_within, check_fits, device_memory_bytes
from kvmosaic.memory.storage import BlockStorage, StoredLayer

__all__ = ["BlockStorage", "StoredLayer", "blocks_within", "check_fits", "device_memory_bytes"]
