"""Paged layouts: keys and values as two views of a cache, token by token, with any strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvmosaic.errors import NotMovable
from kvmosaic.integrations.vllm.worker.layouts.layout import heads_of, numbered, require_plain, stand_in


class PagedLayout:
    """Two views into the cache of a layer.

    keys [N, P, G, D]    values [N, P, G, Dv]        N blocks of P tokens; the strides may be any
    """

    is_latent = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        num_blocks, self.block_size, _, self.key_size = keys.shape
        self.num_slots = num_blocks * self.block_size

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KeyValueLayout.read`."""
        place = slots // self.block_size, slots % self.block_size
        return self.keys[place], self.values[place]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """See `KeyValueLayout.write`."""
        assert values is not None
        place = slots // self.block_size, slots % self.block_size
        self.keys[place], self.values[place] = keys, values


def checked(
    layer_name: str, layer: Any, caches: tuple[Tensor, ...], block_dim: int, views: Callable[..., tuple[Tensor, Tensor]]
) -> PagedLayout:
    """Creates the layout of a layer's cache, seen through `views(*caches)`.

    The layer's backend writes numbers into a small cache of the same order, and the views must show them.

    Raises:
        NotMovable: they do not, the views' shape is not that of the layer's heads, or the cache is quantized.
    """
    for cache in caches:
        require_plain(layer_name, cache)
    backend = layer.attn_backend.get_name()
    layout = PagedLayout(*views(*caches))
    num_heads, key_size, value_size = heads_of(layer)
    if layout.keys.shape[2:] != (num_heads, key_size) or layout.values.shape[2:] != (num_heads, value_size):
        raise NotMovable(
            f"{layer_name} has a {backend} cache of shape {tuple(caches[0].shape)}; expected {num_heads} heads with "
            f"keys of {key_size} and values of {value_size} numbers"
        )
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is not None:
        trials = tuple(stand_in(cache, block_dim) for cache in caches)
        trial = PagedLayout(*views(*trials))
        slots = torch.arange(trial.num_slots, device=caches[0].device).flip(0)
        keys = numbered(len(slots), num_heads, key_size, like=caches[0])
        values = numbered(len(slots), num_heads, value_size, like=caches[0], first=7)
        update(layer, keys, values, trials if len(trials) > 1 else trials[0], slots)
        read_keys, read_values = trial.read(slots)
        if not torch.equal(read_keys, keys) or not torch.equal(read_values, values):
            raise NotMovable(f"{layer_name}: keys and values that {backend} wrote are not found in its cache")
    return layout


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
