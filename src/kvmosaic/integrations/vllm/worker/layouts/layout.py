"""Protocol of KV cache layouts: access to a layer's keys and values in vLLM's paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from kvmosaic.errors import NotMovable
from kvmosaic.integrations.vllm.worker.layouts.quantized import PLAIN, Quantization


class KeyValueLayout(Protocol):
    """Reads and writes the keys and values of tokens in one attention layer's cache.

    A slot is `block * block_size + offset`: the location of one token. A cache whose blocks are parts of the
    scheduler's blocks numbers its slots the same way, so a slot means the same token under both block sizes.
    """

    block_size: int
    """Tokens per block, as the attention kernel counts them."""
    num_slots: int
    key_size: int
    """D, the head size of a key; for a latent row, its full size."""
    is_latent: bool
    """One row per token instead of keys and values; its last numbers are the rotary part."""

    @property
    def quantization(self) -> Quantization | None:
        """How numbers are kept in eight bits, which `read` and `write` do not show; None: as they are."""

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Copies the content of these slots.

        Args:
            slots: [T] whole numbers (int64), on the cache's device.

        Returns:
            Keys [T, G, D] and values [T, G, Dv], for each of the G heads; of a latent cache, rows [T, 1, D] and None.
        """

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """Writes into these slots what `read` returned for others: `read` of them then returns the same bytes."""


def heads_of(layer: Any) -> tuple[int, int, int]:
    """G, D and Dv of an attention layer: its KV heads, and the head sizes of keys and values."""
    key_size = int(layer.head_size)
    return int(layer.num_kv_heads), key_size, int(getattr(layer, "head_size_v", None) or key_size)


def require_plain(layer_name: str, cache: Tensor) -> None:
    """Raises `NotMovable` unless the cache holds plain floating-point numbers."""
    if cache.dtype not in PLAIN:
        raise NotMovable(
            f"{layer_name} keeps keys and values as {cache.dtype}; only unquantized caches can be moved: "
            "start with --kv-cache-dtype auto"
        )


def stand_in(cache: Tensor, block_dim: int, num_blocks: int = 2) -> Tensor:
    """A small cache of zeros in the same memory order, for trials."""
    return torch.empty_like(cache.narrow(block_dim, 0, min(num_blocks, cache.shape[block_dim]))).zero_()


def numbered(num_tokens: int, num_heads: int, size: int, *, like: Tensor, first: int = 0) -> Tensor:
    """[T, G, D] of small whole numbers, exact in every dtype, different from their neighbours in every dimension."""
    return _counted(num_tokens, num_heads, size, first, 251).to(device=like.device, dtype=like.dtype)


def _counted(num_tokens: int, num_heads: int, size: int, first: int, below: int) -> Tensor:
    numbers = torch.arange(num_tokens * num_heads * size, dtype=torch.int64).reshape(num_tokens, num_heads, size)
    return (numbers * 31 + first) % below


def is_read_back(
    layout: KeyValueLayout, num_heads: int, value_size: int, like: Tensor, write: Callable[..., object] | None = None
) -> bool:
    """Whether keys and values that were written to all slots of a small cache, in reverse order, are read back.

    Args:
        layout: the layout of the small cache.
        num_heads: G.
        value_size: Dv.
        like: a tensor of the cache's dtype, on its device.
        write: the kernel that writes, called with slots, keys and values; None: that of the layout.
    """
    slots = torch.arange(layout.num_slots, device=like.device).flip(0)
    how = layout.quantization
    if how is None:
        keys = numbered(len(slots), num_heads, layout.key_size, like=like)
        values = numbered(len(slots), num_heads, value_size, like=like, first=7)
    else:
        keys, values = (
            how.numbered(_counted(len(slots), num_heads, width, first, 61), which).to(like.device)
            for which, (width, first) in enumerate(((layout.key_size, 0), (value_size, 7)))
        )
    (write or layout.write)(slots, keys, values)
    read_keys, read_values = layout.read(slots)
    if how is not None:  # what is read is not rounded to the layer's dtype
        read_keys, read_values = read_keys.to(how.dtype), None if read_values is None else read_values.to(how.dtype)
    return torch.equal(read_keys, keys) and read_values is not None and torch.equal(read_values, values)
