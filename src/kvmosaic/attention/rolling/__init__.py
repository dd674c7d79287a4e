"""Rolling KV cache: sinks and the newest tokens of an endless stream, in memory of fixed size."""

from kvmosaic.attention.rolling.cache import BlockKVCache
from kvmosaic.attention.rolling.positions import sink_distance

__all__ = ["BlockKVCache", "sink_distance"]
