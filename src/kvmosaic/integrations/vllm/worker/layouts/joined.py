"""Joined layout: keys and values next to each other in one row, as in GPU attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvmosaic.integrations.vllm.worker.layouts.layout import heads_of
from kvmosaic.integrations.vllm.worker.layouts.paged import PagedLayout, checked


class JoinedLayout:
    """The cache that vLLM always shows as [blocks, heads, tokens, numbers], whatever the byte order.

    cache [N, G, P, D + Dv]:    one row │ key │ value │
    """

    @classmethod
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> PagedLayout | None:
        """The layout of such a cache; None for another one.

        Raises:
            NotMovable: the backend writes elsewhere, or quantized numbers.
        """
        num_heads, key_size, value_size = heads_of(layer)
        if not isinstance(kv_cache, Tensor) or kv_cache.dim() != 4 or kv_cache.shape[1] != num_heads:
            return None
        if kv_cache.shape[3] != key_size + value_size:
            return None

        def views(cache: Tensor) -> tuple[Tensor, Tensor]:
            rows = cache.transpose(1, 2)
            return rows[..., :key_size], rows[..., key_size:]

        return checked(layer_name, layer, (kv_cache,), 0, views)
