"""Cache layout of vLLM's CPU attention: each block and head packed for the CPU's instruction set."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvmosaic.attention.native.backend import Library, gather, load_library
from kvmosaic.errors import NativeUnavailable, NotMovable
from kvmosaic.vllm.worker.layouts.layout import (
    Quantization,
    QuantizedLayout,
    heads_of,
    is_read_back,
    stand_in,
)


class CpuWriter:
    """Writes with vLLM's own kernel, which knows the order of every instruction set."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, cache: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values [T, G, D] to slots [T] of a cache [N, G, P, 2D]."""
        keys, values = keys.contiguous(), values.contiguous()
        update = getattr(self.layer.impl, "do_kv_cache_update", None)
        if update is not None:
            update(self.layer, keys, values, cache, slots)
            return
        # before vLLM had that method, its forward called the kernel directly
        from vllm import _custom_ops as operations
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        num_blocks, num_heads, block_size, _ = cache.shape
        key_cache, value_cache = cache.view(num_blocks, num_heads, 2 * block_size, -1).chunk(2, dim=2)
        instructions = _get_attn_isa(cache.dtype, block_size, keys.shape[-1])
        operations.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, instructions)


class CpuLayout:
    """The cache of a layer of the CPU backend, in any order."""

    @classmethod
    def of(
        cls, layer_name: str, layer: Any, kv_cache: Any
    ) -> CpuVectorLayout | CpuTiledLayout | QuantizedLayout | None:
        """The layout of a layer of the CPU backend; None for a layer of another one.

        Raises:
            NotMovable: a cache that is quantized otherwise than in float8 with a scale for each layer, or from which
                written numbers are not read back.
        """
        if not isinstance(kv_cache, Tensor) or layer.attn_backend.get_name() != "CPU_ATTN":
            return None
        quantization = Quantization.of(layer_name, layer, kv_cache)
        num_heads, key_size, value_size = heads_of(layer)
        if kv_cache.dim() != 4 or kv_cache.shape[1] != num_heads or kv_cache.shape[3] != key_size + value_size:
            raise NotMovable(
                f"{layer_name} has a CPU cache of shape {tuple(kv_cache.shape)}; expected "
                f"[blocks, {num_heads}, block size, {key_size + value_size}]"
            )
        writer = CpuWriter(layer)
        if key_size == value_size and _is_found(CpuVectorLayout(stand_in(kv_cache, 0), writer), quantization):
            return _numbers(CpuVectorLayout(kv_cache, writer), quantization)
        places = _places(layer_name, kv_cache, writer, key_size, value_size, quantization)
        if not _is_found(CpuTiledLayout(stand_in(kv_cache, 0), writer, *places), quantization):
            raise NotMovable(f"{layer_name}: the CPU kernel packs tokens together; they cannot be moved apart")
        return _numbers(CpuTiledLayout(kv_cache, writer, *places), quantization)


class CpuVectorLayout:
    """The order of most instruction sets: keys transposed, then values.

        one block of one head:    │ keys [D, P] │ values [P, D] │

    P tokens, D numbers.
    """

    is_latent = False
    quantization: Quantization | None = None

    def __init__(self, cache: Tensor, writer: CpuWriter) -> None:
        """Takes a cache [N, G, P, 2D]."""
        self.cache, self.writer = cache, writer
        num_blocks, num_heads, self.block_size, both = cache.shape
        self.key_size = both // 2
        self.num_slots = num_blocks * self.block_size
        halves = cache.view(num_blocks, num_heads, 2, -1)
        self._keys = halves[:, :, 0].view(num_blocks, num_heads, self.key_size, self.block_size)
        self._values = halves[:, :, 1].view(num_blocks, num_heads, self.block_size, self.key_size)

    def read(self, slots: Tensor, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """See `KeyValueLayout.read`; into `out` where that is possible."""
        library = _library()
        if library is not None and self.cache.itemsize in (2, 4):
            return gather(library, self.cache, slots, out)
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return self._keys[blocks, :, :, offsets], self._values[blocks, :, offsets]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """See `KeyValueLayout.write`."""
        assert values is not None
        self.writer(self.cache, slots, keys, values)


class CpuTiledLayout:
    """Another order, such as tiles for matrix instructions: detected from where the kernel writes known numbers.

        key_places, value_places [P, G, D]:    where in a block [2·G·P·D] number d of head g of token p is stored

    Writes use the kernel; reads use these tables.
    """

    is_latent = False
    quantization: Quantization | None = None

    def __init__(self, cache: Tensor, writer: CpuWriter, key_places: Tensor, value_places: Tensor) -> None:
        self.cache, self.writer = cache, writer
        self.key_places, self.value_places = key_places, value_places
        self.block_size, _, self.key_size = key_places.shape
        self.num_slots = cache.shape[0] * self.block_size

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KeyValueLayout.read`."""
        numbers, block_numbers = self.cache.view(-1), self.cache[0].numel()
        blocks, offsets = slots // self.block_size, slots % self.block_size
        start = (blocks * block_numbers)[:, None, None]
        return numbers[start + self.key_places[offsets]], numbers[start + self.value_places[offsets]]

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """See `KeyValueLayout.write`."""
        assert values is not None
        self.writer(self.cache, slots, keys, values)


@cache
def _library() -> Library | None:
    """Our C extension; None: it was not built."""
    try:
        return load_library()
    except NativeUnavailable:
        return None


def _numbers(
    layout: CpuVectorLayout | CpuTiledLayout, quantization: Quantization | None
) -> CpuVectorLayout | CpuTiledLayout | QuantizedLayout:
    """The layout of numbers, of one that may be of bytes; these are written by the kernel."""
    return layout if quantization is None else QuantizedLayout(layout, quantization, by_kernel=True)


def _places(
    layer_name: str,
    cache: Tensor,
    writer: CpuWriter,
    key_size: int,
    value_size: int,
    quantization: Quantization | None,
) -> tuple[Tensor, Tensor]:
    """Locations in a block of each number of each token: keys [P, G, D], values [P, G, Dv]."""
    trial = stand_in(cache, 0, num_blocks=1)
    _, num_heads, block_size, _ = trial.shape
    sizes = {"keys": key_size, "values": value_size}
    found = {}
    for which in sizes:
        total = block_size * num_heads * sizes[which]
        ranks = torch.arange(total).reshape(block_size, num_heads, sizes[which])
        rank_at = torch.zeros(trial.numel(), dtype=torch.int64)
        is_mine = torch.zeros(trial.numel(), dtype=torch.bool)
        # numbers above 256 are not exact in every dtype: a rank is written as base-64 digits, each plus one
        for shift in range(0, max(1, total.bit_length()), 6):
            digits = (ranks >> shift) % 64
            given = {name: torch.zeros(block_size, num_heads, size) for name, size in sizes.items()}
            first, dtype = 1, trial.dtype
            if quantization is None:
                given[which] = digits + first
            else:  # the bytes themselves count
                first, dtype = quantization.first_code, quantization.dtype
                given[which] = quantization.numbered(digits, list(sizes).index(which))
            trial.zero_()
            typed = {name: tensor.to(dtype) for name, tensor in given.items()}
            writer(trial, torch.arange(block_size), typed["keys"], typed["values"])
            seen = trial.view(-1).to(torch.int64)
            is_mine |= seen > 0
            rank_at += (seen - first).clamp(min=0) << shift
        places = torch.full((total,), -1)
        mine = is_mine.nonzero()[:, 0]
        if len(mine) != total or not torch.equal(rank_at[mine].sort().values, torch.arange(total)):
            raise NotMovable(f"{layer_name}: the {which} that the CPU kernel wrote are not found in its cache")
        places[rank_at[mine]] = mine
        found[which] = places.reshape(block_size, num_heads, sizes[which])
    return found["keys"], found["values"]


def _is_found(layout: CpuVectorLayout | CpuTiledLayout, quantization: Quantization | None) -> bool:
    """Whether the kernel writes numbers where this layout reads them."""
    _, num_heads, _, size = layout.cache.shape
    return is_read_back(_numbers(layout, quantization), num_heads, size - layout.key_size, layout.cache)
