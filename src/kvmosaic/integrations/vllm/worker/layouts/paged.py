"""Paged layout: keys and values as two views of a cache, token by token, with any strides."""

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
