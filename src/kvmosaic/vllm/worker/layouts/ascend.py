"""Cache layouts of vLLM-Ascend: keys and values; a latent and its rotary part; and the keys of an indexer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvmosaic.errors import NotMovable
from kvmosaic.vllm.worker.key_rotation import KeyRotation
from kvmosaic.vllm.worker.layouts.layout import (
    PLAIN,
    Quantization,
    heads_of,
    is_read_back,
    numbered,
    require_plain,
    stand_in,
)
from kvmosaic.vllm.worker.layouts.paged import PagedLayout

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

    def __init__(self, latent: Tensor, rotation: Tensor) -> None:
        self.latent, self.rotation = latent, rotation
        num_blocks, self.block_size, _, self.latent_size = latent.shape
        self.key_size = self.latent_size + rotation.shape[-1]
        self.num_slots = num_blocks * self.block_size

    @classmethod
    def of(cls, layer_name: str, layer: Any, kv_cache: Any) -> AscendLatentLayout | None:
        """The layout of a latent layer; None for one with keys and values, or of another platform.

        Raises:
            NotMovable: a cache of compressed tokens, quantized, sharded over devices, or in a chip-specific order; or
                the kernel stores something else than expected.
        """
        if not is_ascend(layer) or not hasattr(layer, "kv_lora_rank"):
            return None
        impl = layer.impl
        kind = type(impl).__module__.rpartition(".")[2]
        if kind not in ("mla_v1", "sfa_v1") and ".context_parallel" not in type(impl).__module__:
            raise NotMovable(f"{layer_name} keeps its tokens by {kind}, whose cache is not known; nothing is moved")
        if getattr(impl, "enable_kv_nz", False):
            raise NotMovable(f"{layer_name} keeps rows in the chip's own order; start without enable_kv_nz")
        if getattr(impl, "fa_quant_layer", False):
            raise NotMovable(f"{layer_name} quantizes its latent rows; only unquantized caches can be moved")
        latent, rotation = _pair(layer_name, layer, kv_cache)
        _require_shape(layer_name, "latent rows", latent, (1, int(layer.kv_lora_rank)))
        _require_shape(layer_name, "turning rows", rotation, (1, int(layer.qk_rope_head_dim)))
        _confirm_rows(layer_name, impl, cls(stand_in(latent, 0), stand_in(rotation, 0)))
        return cls(latent, rotation)

    def fitted(self, rotation: KeyRotation) -> KeyRotation:
        """The rotation of its rows: in halves, also where the model pairs neighbours."""
        return replace(rotation, layout="half")

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


class AscendIndexLayout:
    """Keys by which an indexer scores tokens, beside the latent rows of its layer.

    keys [N, P, 1, D]    read as │ rotary │ not rotated │
    C8                   scales [N, P, 1, 1], keys = the nearest codes to (key Hadamard) / scale, per token
    """

    is_latent = False

    def __init__(self, name: str, indexer: Any, keys: Tensor, scales: Tensor | None) -> None:
        self._name, self._indexer, self.keys, self.scales = name, indexer, keys, scales
        num_blocks, self.block_size, _, self.key_size = keys.shape
        self.num_slots = num_blocks * self.block_size
        self.quantization: Quantization | None = None
        if scales is not None:
            one = torch.ones((), device=keys.device)
            self.quantization = Quantization(keys.dtype, (one, one), torch.float32)
            self._turn = indexer.k_hadamard.to(torch.float32)
            self._length = self._turn[0].square().sum()  # of a rounded row; 1 if nothing was rounded

    @classmethod
    def of(cls, name: str, indexer: Any, cache: Any) -> AscendIndexLayout:
        """The layout of an indexer's cache.

        Raises:
            NotMovable: of another shape, or quantized otherwise.
        """
        keys, scales = cache[0], cache[1] if len(cache) > 1 else None
        _require_shape(name, "index keys", keys, (1, int(indexer.head_dim)))
        if scales is None:
            require_plain(name, keys)
        else:
            _require_shape(name, "scales of index keys", scales, (1, 1))
            if keys.dtype not in _MOST or scales.dtype not in PLAIN:
                raise NotMovable(f"{name} keeps index keys as {keys.dtype} with scales of {scales.dtype}: not known")
        return cls(name, indexer, keys, scales)

    def fitted(self, rotation: KeyRotation) -> KeyRotation:
        """The rotation of its keys, as the layer's own code turns those of one token at two positions.

        Raises:
            NotMovable: it turns them otherwise.
        """
        position = min(97, rotation.num_positions - 1)
        device = rotation.table.device
        old, new = torch.tensor([0], device=device), torch.tensor([position], device=device)
        cos, sin = rotation.rows(torch.cat((old, new))).chunk(2, dim=-1)
        double = (torch.cat((half, half), dim=-1)[:, None, None] for half in (cos, sin))
        rows = torch.randn(1, int(self._indexer.wk_weights_proj.input_size), generator=torch.Generator().manual_seed(0))
        compute = getattr(self._indexer, "forward_k", None) or self._indexer.indexer_select_pre_process
        try:
            codes, scales, *_ = compute(rows.expand(2, -1).to(device, rotation.dtype), *double)
        except Exception as error:  # whatever a foreign kernel raises
            raise NotMovable(
                f"{self._name}: trying its indexer fails: {type(error).__name__}: {error}"[:400]
            ) from error
        keys = self._numbers(codes.view(2, 1, -1), None if scales is None else scales.view(2, 1, 1)).float()
        for layout in ("half", "interleaved"):
            found = replace(rotation, first=0, layout=layout)
            moved = keys[:1].clone()
            found.rotate(moved, found.factors(old, new))
            if (moved - keys[1:]).abs().max() <= _FAR * keys.abs().max():
                return found
        raise NotMovable(f"{self._name}: its indexer turns keys otherwise than attention does; nothing is moved")

    def read(self, slots: Tensor) -> tuple[Tensor, None]:
        """See `KeyValueLayout.read`; those in eight bits in float32."""
        where = slots // self.block_size, slots % self.block_size
        return self._numbers(self.keys[where], None if self.scales is None else self.scales[where]), None

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """See `KeyValueLayout.write`."""
        assert values is None
        where = slots // self.block_size, slots % self.block_size
        if self.scales is None:
            self.keys[where] = keys
            return
        turned, most = keys.float() @ self._turn, _MOST[self.keys.dtype]
        scales = (turned.abs().amax(-1, keepdim=True) / most).to(self.scales.dtype)
        self.scales[where] = scales
        codes = (turned / scales.float().clamp(min=torch.finfo(torch.float32).tiny)).clamp(-most, most)
        self.keys[where] = (codes.round() if self.keys.dtype is torch.int8 else codes).to(self.keys.dtype)

    def _numbers(self, codes: Tensor, scales: Tensor | None) -> Tensor:
        return codes if scales is None else codes.float() * scales.float() @ self._turn.T / self._length


_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest code of the formats of eight bits."""
_FAR = 0.15
"""Max error of a moved index key, relative to its largest number: less than by a wrong angle, more than by rounding."""


def with_indexers(layers: Mapping[str, Any], caches: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Name, attention layer, cache and None for each cache; for that of an indexer, the indexer.

    Until 0.23, a layer's tuple of caches ends with that of its indexer; since 0.30, it has a name of its own.
    """
    indexers = {id(layer): _indexer_of(layer) for layer in layers.values()}
    owners = {id(getattr(indexers[id(layer)], "k_cache", None)): layer for layer in layers.values()}
    owners.pop(id(None), None)
    for name, cache in caches.items():
        layer = layers.get(name)
        indexer = indexers.get(id(layer))
        if (owner := owners.get(id(layer))) is not None:
            yield name, owner, cache, indexers[id(owner)]
        elif indexer is not None and len(cache) > 2:
            yield name, layer, cache[:2], None
            yield f"{name}.indexer", layer, cache[2:], indexer
        else:
            yield name, layer, cache, None


def _indexer_of(layer: Any) -> Any:
    """What computes a layer's index keys: its implementation, or since 0.30 one of the indexer's own."""
    impl: Any = getattr(layer, "impl", None)
    has_one = type(impl).__module__ == f"{_PACKAGE}attention.sfa_v1" and getattr(impl, "has_indexer", False)
    return getattr(impl.indexer, "impl", impl) if has_one else None


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
    if write is None and hasattr(impl, "exec_kv"):  # of layers with an indexer
        write = partial(impl.exec_kv, attn_metadata=SimpleNamespace())
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
