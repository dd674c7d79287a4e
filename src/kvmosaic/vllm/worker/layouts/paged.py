"""Paged and latent layouts: tokens one by one, as keys and values in two views of a cache, or as one row (MLA)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvmosaic.errors import NotMovable
from kvmosaic.vllm.worker.layouts.layout import (
    KeyValueLayout,
    Quantization,
    QuantizedLayout,
    heads_of,
    is_read_back,
    numbered,
    require_plain,
    stand_in,
)


class PagedLayout:
    """Two views into the cache of a layer.

    keys [N, P, G, D]    values [N, P, G, Dv]        N blocks of P tokens; the strides may be any
    """

    is_latent = False
    quantization: Quantization | None = None

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
) -> PagedLayout | QuantizedLayout:
    """Creates the layout of a layer's cache, seen through `views(*caches)`.

    The layer's backend writes numbers into a small cache of the same order, and the views must show them.

    Raises:
        NotMovable: they do not, the views' shape is not that of the layer's heads, or the cache is quantized otherwise
            than in float8 with a scale for each layer.
    """
    quantization = Quantization.of(layer_name, layer, *caches)
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

        def write(slots: Tensor, keys: Tensor, values: Tensor) -> None:
            update(layer, keys, values, trials if len(trials) > 1 else trials[0], slots)

        if not is_read_back(_numbers(views(*trials), quantization), num_heads, value_size, caches[0], write):
            raise NotMovable(f"{layer_name}: keys and values that {backend} wrote are not found in its cache")
    return _numbers(views(*caches), quantization)


def pages_of(layout: KeyValueLayout) -> tuple[Tensor, Tensor] | None:
    """Keys [N, P, G, D] and values [N, P, G, Dv] of a cache of whole tokens, as they are kept; None for another one."""
    raw, how = (layout.raw, layout.quantization) if isinstance(layout, QuantizedLayout) else (layout, None)
    if not isinstance(raw, PagedLayout):
        return None
    return (raw.keys, raw.values) if how is None else (raw.keys.view(how.format), raw.values.view(how.format))


def _numbers(views: tuple[Tensor, Tensor], quantization: Quantization | None) -> PagedLayout | QuantizedLayout:
    """The layout of numbers in these views."""
    if quantization is None:
        return PagedLayout(*views)
    keys, values = (view.view(torch.uint8) for view in views)
    return QuantizedLayout(PagedLayout(keys, values), quantization, by_kernel=False)


class StackedLayout:
    """A cache with a dimension of two: keys, values.

    cache [N, 2, P, G, D]    or, of other backends,    [2, N, P, G, D]
    """

    @classmethod
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> PagedLayout | QuantizedLayout | None:
        """The layout of such a cache; None for another one.

        Raises:
            NotMovable: the backend writes elsewhere, or numbers of another format.
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
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> PagedLayout | QuantizedLayout | None:
        """The layout of such a pair; None for another cache.

        Raises:
            NotMovable: the backend writes elsewhere, or numbers of another format.
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
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> PagedLayout | QuantizedLayout | None:
        """The layout of such a cache; None for another one.

        Raises:
            NotMovable: the backend writes elsewhere, or numbers of another format.
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


class LatentLayout:
    """Rows of a latent and the rotary part of the key.

    cache [N, P, C], also seen as [N, 1, P, C]:    one row │ latent (kv_lora_rank) │ rotary part │

    Keys and values of every head are computed from the row.
    """

    is_latent = True
    quantization: Quantization | None = None

    def __init__(self, cache: Tensor) -> None:
        """Takes the cache as [N, P, C], with any strides."""
        self.cache = cache
        num_blocks, self.block_size, self.key_size = cache.shape
        self.num_slots = num_blocks * self.block_size

    @classmethod
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> LatentLayout | None:
        """The layout of a latent layer; None for a layer with keys and values.

        Raises:
            NotMovable: an additional sparse index, a quantized cache, or rows of another shape.
        """
        if not isinstance(kv_cache, Tensor) or not hasattr(layer, "kv_lora_rank"):
            return None
        if getattr(layer, "indexer", None) is not None or getattr(layer.impl, "is_sparse", False):
            raise NotMovable(f"{layer_name} selects tokens by an index of their own keys, which is not moved")
        require_plain(layer_name, kv_cache)
        row = int(layer.kv_lora_rank) + int(layer.qk_rope_head_dim)
        rows = kv_cache.squeeze(1) if kv_cache.dim() == 4 and kv_cache.shape[1] == 1 else kv_cache
        if rows.dim() != 3 or rows.shape[2] != row:
            raise NotMovable(
                f"{layer_name} has a latent cache of shape {tuple(kv_cache.shape)}; "
                f"expected [blocks, block size, {row}]"
            )
        _confirm(layer_name, layer, kv_cache)
        return cls(rows)

    def read(self, slots: Tensor) -> tuple[Tensor, None]:
        """See `KeyValueLayout.read`."""
        return self.cache[slots // self.block_size, slots % self.block_size][:, None], None

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """See `KeyValueLayout.write`."""
        assert values is None
        self.cache[slots // self.block_size, slots % self.block_size] = keys[:, 0]


def _confirm(layer_name: str, layer: Any, kv_cache: Tensor) -> None:
    """Checks with a small cache that the layer writes numbers where this layout reads them."""
    if getattr(layer.impl, "do_kv_cache_update", None) is None:
        return
    trial = stand_in(kv_cache, 0)
    layout = LatentLayout(trial.squeeze(1) if trial.dim() == 4 else trial)
    slots = torch.arange(layout.num_slots, device=trial.device).flip(0)
    rows = numbered(len(slots), 1, layout.key_size, like=trial)
    write_rows(layer, trial, slots, rows)
    if not torch.equal(layout.read(slots)[0], rows):
        raise NotMovable(
            f"{layer_name}: the rows that {layer.attn_backend.get_name()} wrote are not found in its cache"
        )


def write_rows(layer: Any, kv_cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Writes rows [T, 1, C] into a latent cache by the kernel of the layer's backend."""
    latent, rotary = rows[:, 0, : layer.kv_lora_rank].contiguous(), rows[..., layer.kv_lora_rank :].contiguous()
    scale = getattr(layer, "_k_scale", None)
    layer.impl.do_kv_cache_update(latent, rotary, kv_cache, slots, layer.kv_cache_dtype, scale)
