"""Stacked layout: all keys, then all values in one tensor, as in GPU attention up to vLLM 0.23."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvmosaic.integrations.vllm.worker.layouts.paged import PagedLayout, checked


class StackedLayout:
    """A cache with a dimension of two: keys, values.

    cache [N, 2, P, G, D]    or, of other backends,    [2, N, P, G, D]
    """

    @classmethod
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> PagedLayout | None:
        """The layout of such a cache; None for another one.

        Raises:
            NotMovable: the backend writes elsewhere, or quantized numbers.
        """
        if not isinstance(kv_cache, Tensor) or kv_cache.dim() != 5:
            return None
        if kv_cache.shape[1] == 2:
            return checked(layer_name, layer, (kv_cache,), 0, lambda cache: (cache[:, 0], cache[:, 1]))
        if kv_cache.shape[0] == 2:
            return checked(layer_name, layer, (kv_cache,), 1, lambda cache: (cache[0], cache[1]))
        return None
