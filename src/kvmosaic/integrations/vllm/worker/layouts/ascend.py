"""Cache layouts of vLLM-Ascend: separate keys and values, or a latent and a separate rotary part."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kvmosaic.errors import NotMovable
from kvmosaic.integrations.vllm.worker.layouts.layout import (
    Quantization,
    heads_of,
    is_read_back,
    numbered,
    require_plain,
    stand_in,
)
from kvmosaic.integrations.vllm.worker.layouts.paged import PagedLayout

_PACKAGE = "vllm_ascend."


def is_ascend(layer: Any) -> bool:
    """Whether vLLM-Ascend computes an attention layer."""
    return type(layer.impl).__module__.startswith(_PACKAGE)


def is_npu(vllm_config: Any) -> bool:
    """Whether vLLM runs on Ascend's chips, by its configuration."""
    return getattr(getattr(vllm_config, "device_config", None), "device_type", "") == "npu"


class AscendLayout(PagedLayout):
    """Keys and values in two tensors, token by token.

    keys [N, P, G, D]    values [N, P, G, Dv]        the cache of a layer is the pair of them
    """

    def __init__(self, layer: Any, impl: Any, keys: Tensor, values: Tensor) -> None:
        """Takes the implementation that writes: the layer's own, or a copy for a trial."""
        super().__init__(keys, values)
        self.layer, self.impl = layer, impl

    @classmethod
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> AscendLayout | None:
        """The layout of a layer with keys and values; None for a latent one, or one of another platform.

        Raises:
            NotMovable: a cache that is quantized, sharded over devices, or in a chip-specific order.
        """
        if not is_ascend(layer) or hasattr(layer, "kv_lora_rank"):
            return None
        if getattr(layer.impl, "use_bnsd_kv_cache", False):  # since 0.30
            raise NotMovable(
                f"{layer_name} stores blocks by head, which are not read; start without VLLM_KV_CACHE_LAYOUT=HND"
            )
        keys, values = _pair(layer_name, layer, kv_cache)
        num_heads, key_size, value_size = heads_of(layer)
        _require_shape(layer_name, "keys", keys, (num_heads, key_size))
        _require_shape(layer_name, "values", values, (num_heads, value_size))
        if getattr(layer, "hashk_cache", None) is not None:
            raise NotMovable(f"{layer_name} selects tokens by hashes of their keys (KVComp), which are not moved")
        # the implementation keeps the first cache that it is given, so the trial uses a copy
        trying = copy.copy(layer.impl)
        trying.key_cache = trying.value_cache = None
        if not is_read_back(cls(layer, trying, stand_in(keys, 0), stand_in(values, 0)), num_heads, value_size, keys):
            raise NotMovable(f"{layer_name}: keys and values that the kernel wrote are not found in its cache")
        return cls(layer, layer.impl, keys, values)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """See `KeyValueLayout.write`."""
        update = getattr(self.impl, "do_kv_cache_update", None)
        if update is None:
            return super().write(slots, keys, values)
        assert values is not None
        cache = (self.keys, self.values)  # its kernel takes 32-bit slots only
        return update(self.layer, keys.contiguous(), values.contiguous(), cache, slots.to(torch.int32))  # type: ignore[no-any-return]


class AscendLatentLayout:
    """A latent and the rotary part of the key, in two tensors, token by token.

        latent [N, P, 1, C]    rotary [N, P, 1, R]         read as one row │ latent │ rotary │

    The model may pair neighbours (0, 1), (2, 3), …: the kernel that rotates them stores all first ones, then all
    second ones, whatever the model says. Queries are sorted alike, so no score changes.
    """

    is_latent = True
    quantization: Quantization | None = None
    is_sorted_apart = True
    """The rotary part is stored in halves, also where the model pairs neighbours."""

    def __init__(self, latent: Tensor, rotation: Tensor) -> None:
        self.latent, self.rotation = latent, rotation
        num_blocks, self.block_size, _, self.latent_size = latent.shape
        self.key_size = self.latent_size + rotation.shape[-1]
        self.num_slots = num_blocks * self.block_size

    @classmethod
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> AscendLatentLayout | None:
        """The layout of a latent layer; None for one with keys and values, or of another platform.

        Raises:
            NotMovable: a cache with a sparse index, quantized, sharded over devices, or in a chip-specific order; or
                the kernel stores something else than expected.
        """
        if not is_ascend(layer) or not hasattr(layer, "kv_lora_rank"):
            return None
        impl = layer.impl
        kind = type(impl).__module__.rpartition(".")[2]
        if kind in ("sfa_v1", "dsa_v1") or getattr(layer, "indexer", None) is not None:
            raise NotMovable(f"{layer_name} selects tokens by an index of their own keys ({kind}), which is not moved")
        if getattr(impl, "enable_kv_nz", False):
            raise NotMovable(f"{layer_name} keeps rows in the chip's own order; start without enable_kv_nz")
        if getattr(impl, "fa_quant_layer", False):
            raise NotMovable(f"{layer_name} quantizes its latent rows; only unquantized caches can be moved")
        latent, rotation = _pair(layer_name, layer, kv_cache)
        _require_shape(layer_name, "latent rows", latent, (1, int(layer.kv_lora_rank)))
        _require_shape(layer_name, "turning rows", rotation, (1, int(layer.qk_rope_head_dim)))
        _confirm_rows(layer_name, impl, cls(stand_in(latent, 0), stand_in(rotation, 0)))
        return cls(latent, rotation)

    def read(self, slots: Tensor) -> tuple[Tensor, None]:
        """See `KeyValueLayout.read`."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return torch.cat((self.latent[blocks, offsets], self.rotation[blocks, offsets]), dim=-1), None

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """See `KeyValueLayout.write`."""
        assert values is None
        blocks, offsets = slots // self.block_size, slots % self.block_size
        self.latent[blocks, offsets] = keys[..., : self.latent_size]
        self.rotation[blocks, offsets] = keys[..., self.latent_size :]


def _pair(layer_name: str, layer: Any, kv_cache: Any) -> tuple[Tensor, Tensor]:
    """The two tensors of a layer's cache, checked to be plain numbers and whole on this device."""
    kind = type(layer.impl)
    if ".context_parallel" in kind.__module__:
        raise NotMovable(f"{layer_name}: context parallel spreads the tokens of a block over several devices")
    if "C8" in kind.__name__:
        raise NotMovable(f"{layer_name} quantizes keys and values (C8); only unquantized caches can be moved")
    if len(kv_cache) != 2 or not all(isinstance(part, Tensor) for part in kv_cache):
        raise NotMovable(f"{layer_name} has a cache of {len(kv_cache)} parts; expected keys and values")
    first, second = kv_cache
    require_plain(layer_name, first)
    require_plain(layer_name, second)
    return first, second


def _require_shape(layer_name: str, what: str, cache: Tensor, row: tuple[int, int]) -> None:
    if cache.dim() != 4 or tuple(cache.shape[2:]) != row:
        raise NotMovable(
            f"{layer_name} has a cache of {what} of shape {tuple(cache.shape)}; expected "
            f"[blocks, block size, {row[0]}, {row[1]}] (the order of the Atlas 300I is not known here)"
        )


def _confirm_rows(layer_name: str, impl: Any, layout: AscendLatentLayout) -> None:
    """Checks where the kernel writes an unrotated row, and in which order."""
    write = getattr(impl, "exec_kv_prefill", None)
    if write is None:
        raise NotMovable(f"{layer_name}: {type(impl).__name__} has no exec_kv_prefill, so its order cannot be tried")
    size = layout.rotation.shape[-1]
    slot = torch.tensor([layout.num_slots - 2], device=layout.rotation.device)
    row = numbered(1, 1, layout.key_size, like=layout.rotation, first=1)[:, 0]
    unturned = torch.ones(1, 1, 1, size).to(row), torch.zeros(1, 1, 1, size).to(row)
    write(row, *unturned, (layout.latent, layout.rotation), slot)
    part = row[0, layout.latent_size :]
    wanted = torch.zeros_like(layout.rotation).flatten(0, 2)
    wanted[slot] = torch.cat((part[0::2], part[1::2]))
    is_written = layout.latent.flatten(0, 2).count_nonzero(dim=-1) > 0
    is_slot = torch.arange(layout.num_slots, device=slot.device) == slot
    if not torch.equal(layout.rotation.flatten(0, 2), wanted) or not torch.equal(is_written, is_slot):
        raise NotMovable(f"{layer_name}: the row that the kernel wrote is not found in its cache, or in another order")
