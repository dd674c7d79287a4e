"""Latent layout of multi-head latent attention (MLA): one row per token, for keys and values together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvmosaic.errors import NotMovable
from kvmosaic.integrations.vllm.worker.layouts.layout import numbered, require_plain, stand_in


class LatentLayout:
    """Rows of a latent and the rotary part of the key.

    cache [N, P, C], also seen as [N, 1, P, C]:    one row │ latent (kv_lora_rank) │ rotary part │

    Keys and values of every head are computed from the row.
    """

    is_latent = True

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
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        return
    trial = stand_in(kv_cache, 0)
    layout = LatentLayout(trial.squeeze(1) if trial.dim() == 4 else trial)
    slots = torch.arange(layout.num_slots, device=trial.device).flip(0)
    rows = numbered(len(slots), 1, layout.key_size, like=trial)
    latent, rotary = rows[:, 0, : layer.kv_lora_rank].contiguous(), rows[..., layer.kv_lora_rank :].contiguous()
    update(latent, rotary, trial, slots, layer.kv_cache_dtype, getattr(layer, "_k_scale", None))
    if not torch.equal(layout.read(slots)[0], rows):
        raise NotMovable(
            f"{layer_name}: the rows that {layer.attn_backend.get_name()} wrote are not found in its cache"
        )
