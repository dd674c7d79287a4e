"""Tokens of a paged cache with transposed keys, as vLLM's CPUs have it, copied by the C extension."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvmosaic.attention.native.backend import Library


class _Gather(ctypes.Structure):
    """`Gather` in gather.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("cache", "slots", "keys", "values")),
        *((name, c_int64) for name in ("num_slots", "num_heads", "dim", "block_size", "number_bytes", "block_bytes")),
        ("next", c_int64),
    )


def gather(
    library: Library,
    cache: Float[Tensor, "N G P D2"],
    slots: Int[Tensor, " S"],
    out: tuple[Float[Tensor, "S G D"], Float[Tensor, "S G D"]] | None = None,
) -> tuple[Float[Tensor, "S G D"], Float[Tensor, "S G D"]]:
    """Keys and values of tokens.

    Args:
        library: the extension.
        cache: [N, G, P, 2D], each block and head contiguous: keys [D, P], then values [P, D].
        slots: [S] int64; token p of block n is slot n P + p.
        out: where to, contiguous: new memory in every call would be zeroed by the system first.

    Raises:
        ValueError: a cache of another kind, or a slot outside it.
    """
    num_blocks, num_heads, block_size, both = cache.shape
    if cache.device.type != "cpu" or cache.itemsize not in (2, 4) or not cache[0].is_contiguous():
        raise ValueError(f"a cache of {cache.dtype} with strides {cache.stride()} on {cache.device}")
    if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < num_blocks * block_size:
        raise ValueError(f"slots {int(slots.min())} to {int(slots.max())} of {num_blocks * block_size}")
    slots = slots.to(torch.int64).contiguous()
    shape = (len(slots), num_heads, both // 2)
    keys, values = out or (torch.empty(shape, dtype=cache.dtype), torch.empty(shape, dtype=cache.dtype))
    for each in (keys, values):
        if each.shape != shape or each.dtype is not cache.dtype or not each.is_contiguous():
            raise ValueError(f"copies of {shape} do not go into {tuple(each.shape)} of {each.dtype}")
    given = _Gather(
        cache=cache.data_ptr(),
        slots=slots.data_ptr(),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        num_slots=len(slots),
        num_heads=num_heads,
        dim=both // 2,
        block_size=block_size,
        number_bytes=cache.itemsize,
        block_bytes=cache.stride(0) * cache.itemsize,
    )
    library.functions.kvmosaic_gather(ctypes.byref(given), library.parallel, c_int64(torch.get_num_threads()))
    return keys, values
