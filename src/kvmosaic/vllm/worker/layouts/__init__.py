"""KV cache layouts of vLLM's attention backends: one protocol, and one file per layout."""

from __future__ import annotations

from typing import Any

from kvmosaic.errors import NotMovable
from kvmosaic.vllm.worker.layouts.ascend import (
    AscendIndexLayout,
    AscendLatentLayout,
    AscendLayout,
    with_indexers,
)
from kvmosaic.vllm.worker.layouts.cpu import CpuLayout
from kvmosaic.vllm.worker.layouts.layout import KeyValueLayout, require_plain
from kvmosaic.vllm.worker.layouts.paged import JoinedLayout, LatentLayout, SeparateLayout, StackedLayout

__all__ = ["LAYOUTS", "KeyValueLayout", "find_layout", "with_indexers"]

LAYOUTS: tuple[Any, ...] = (
    AscendLayout,
    AscendLatentLayout,
    LatentLayout,
    CpuLayout,
    JoinedLayout,
    StackedLayout,
    SeparateLayout,
)
"""In order of preference: `of(layer_name, layer, kv_cache)` returns None for caches of another layout."""


def find_layout(layer_name: str, layer: Any, kv_cache: Any, indexer: Any = None) -> KeyValueLayout:
    """Finds the layout of an attention layer's cache; with an indexer, see `with_indexers`, of that of its keys.

    Raises:
        NotMovable: no known layout reads this cache, or it must not be moved; the message says why.
    """
    if indexer is not None:
        return AscendIndexLayout.of(layer_name, indexer, kv_cache)
    for kind in LAYOUTS:
        try:
            found: KeyValueLayout | None = kind.of(layer_name, layer, kv_cache)
        except NotMovable:
            raise
        except Exception as error:  # whatever a foreign kernel raises, the cache is unknown then
            backend = layer.attn_backend.get_name()
            raise NotMovable(f"{layer_name}: trying the cache of {backend} fails: {error}") from error
        if found is not None:
            return found
    if hasattr(kv_cache, "dtype"):
        require_plain(layer_name, kv_cache)
    shape = tuple(kv_cache.shape) if hasattr(kv_cache, "shape") else f"{type(kv_cache).__name__} of {len(kv_cache)}"
    raise NotMovable(f"{layer_name}: no layout is known for a {layer.attn_backend.get_name()} cache of shape {shape}")
