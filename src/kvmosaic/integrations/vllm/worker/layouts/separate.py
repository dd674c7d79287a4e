"""Separate layout: keys and values in two tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvmosaic.integrations.vllm.worker.layouts.paged import PagedLayout, checked


class SeparateLayout:
    """A pair of caches.

    keys [N, P, G, D]    values [N, P, G, Dv]
    """

    @classmethod
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> PagedLayout | None:
        """The layout of such a pair; None for another cache.

        Raises:
            NotMovable: the backend writes elsewhere, or quantized numbers.
        """
        if not isinstance(kv_cache, tuple | list) or len(kv_cache) != 2 or hasattr(layer, "kv_lora_rank"):
            return None
        if not all(isinstance(part, Tensor) and part.dim() == 4 for part in kv_cache):
            return None
        return checked(layer_name, layer, tuple(kv_cache), 0, lambda keys, values: (keys, values))
