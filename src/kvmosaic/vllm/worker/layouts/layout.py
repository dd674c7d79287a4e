"""Protocol of KV cache layouts: access to a layer's keys and values in vLLM's paged cache; and caches in eight bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from kvmosaic.errors import NotMovable

FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""By vLLM's name of a cache's dtype. Its other names mean scales of each head or token, or for other formats."""
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False, slots=True)
class Quantization:
    """How a layer keeps a number x: as the float8 number nearest to x / scale.

    format: of the bytes
    scales: of keys and of values, one float32 each, on the cache's device
    dtype: in which the layer computes
    """

    format: torch.dtype
    scales: tuple[Tensor, Tensor]
    dtype: torch.dtype

    first_code: ClassVar[int] = 16
    """The first of `num_codes` bytes that are adjacent normal numbers in every format."""
    num_codes: ClassVar[int] = 64

    @classmethod
    def of(cls, layer_name: str, layer: Any, *caches: Tensor) -> Quantization | None:
        """How a layer's caches are quantized; None if they hold plain floating-point numbers.

        Raises:
            NotMovable: another format, or scales that are not one number for the layer from the start.
        """
        if all(cache.dtype in PLAIN for cache in caches):
            return None
        name, dtype = str(getattr(layer, "kv_cache_dtype", "")), caches[0].dtype
        kept = FORMATS.get(name)
        if kept is None or dtype not in (torch.uint8, kept) or any(cache.dtype is not dtype for cache in caches):
            raise NotMovable(
                f"{layer_name} keeps keys and values as {dtype} ({name or 'of an unknown format'}); beside plain "
                f"numbers only float8 with a scale for each layer can be read ({', '.join(FORMATS)}): start with "
                "--kv-cache-dtype auto"
            )
        if getattr(layer, "calculate_kv_scales", False):
            raise NotMovable(
                f"{layer_name} calculates the scales of its cache from its first prompt; start without "
                "--calculate-kv-scales"
            )
        scales = tuple(getattr(layer, which, None) for which in ("_k_scale", "_v_scale"))
        if not all(isinstance(each, Tensor) and each.numel() == 1 for each in (*scales, _query_scale(layer))):
            raise NotMovable(
                f"{layer_name} has not one scale for its keys and one for its values, but some for each head: start "
                "with --kv-cache-dtype auto"
            )
        computed = getattr(layer, "dtype", None)
        key_scale, value_scale = (scale.detach().reshape(()) for scale in scales if scale is not None)
        return cls(kept, (key_scale, value_scale), computed if computed in PLAIN else torch.float32)

    def numbers(self, codes: Tensor, which: int) -> Tensor:
        """Numbers in float32 that these bytes (uint8) mean, as keys (0) or values (1)."""
        return codes.view(self.format).to(torch.float32) * self.scales[which].to(codes.device, torch.float32)

    def codes(self, numbers: Tensor, which: int) -> Tensor:
        """Bytes (uint8) of the nearest numbers; what is too large becomes the largest."""
        scaled = numbers.to(torch.float32) / self.scales[which].to(numbers.device, torch.float32)
        most = torch.finfo(self.format).max
        return scaled.clamp(-most, most).to(self.format).view(torch.uint8)

    def smallest(self, which: int) -> float:
        """The smallest number above zero, of keys (0) or values (1)."""
        return torch.finfo(self.format).smallest_normal * torch.finfo(self.format).eps * float(self.scales[which])

    def rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What would be read of these keys and values, in their dtypes."""
        return (
            self.numbers(self.codes(keys, 0), 0).to(keys.dtype),
            self.numbers(self.codes(values, 1), 1).to(values.dtype),
        )

    def numbered(self, digits: Tensor, which: int) -> Tensor:
        """Numbers in the layer's dtype that are kept as adjacent bytes, one for each digit from 0 to 63."""
        assert int(digits.max()) < self.num_codes
        return self.numbers((digits + self.first_code).to(torch.uint8), which).to(self.dtype)


def _query_scale(layer: Any) -> Any:
    """The scale of a layer's queries; where it does not quantize them, any number."""
    return torch.ones(()) if getattr(layer, "query_quant", None) is None else getattr(layer, "_q_scale", None)


class QuantizedLayout:
    """A layout of bytes, read and written as numbers.

    Writing what was read gives the same bytes. A key that is rotated in between is rounded once more.
    """

    is_latent = False

    def __init__(self, raw: Any, quantization: Quantization, *, by_kernel: bool) -> None:
        """Takes the layout of the bytes.

        Args:
            raw: reads bytes (uint8).
            quantization: what they mean.
            by_kernel: whether `raw` writes numbers, in the layer's dtype, which its kernel quantizes; otherwise bytes.
        """
        self.raw, self.quantization, self._by_kernel = raw, quantization, by_kernel
        self.block_size, self.num_slots, self.key_size = raw.block_size, raw.num_slots, raw.key_size

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """See `KeyValueLayout.read`; in float32."""
        keys, values = self.raw.read(slots)
        return self.quantization.numbers(keys, 0), self.quantization.numbers(values, 1)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor | None) -> None:
        """See `KeyValueLayout.write`; of any dtype."""
        assert values is not None
        if self._by_kernel:
            self.raw.write(slots, keys.to(self.quantization.dtype), values.to(self.quantization.dtype))
        else:
            self.raw.write(slots, self.quantization.codes(keys, 0), self.quantization.codes(values, 1))


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
