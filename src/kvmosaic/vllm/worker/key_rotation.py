"""Key rotation by the model's own rounded table: `kvmosaic.rope` computes exact angles, which vLLM does not use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvmosaic.errors import NotMovable, PromptTooLong
from kvmosaic.rope import RotationLayout, paired


@dataclass(frozen=True, slots=True)
class Factors:
    """Rotation factors of T keys: cosines and sines of the angle between two positions, [T, 1, R/2] each."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False)
class KeyRotation:
    """How a layer's keys rotate with their position.

        key:    │ … not rotated … │ first … first + R │ … not rotated … │        R = rotary_dim
        half           pairs (0, R/2), (1, R/2 + 1), …      interleaved    pairs (0, 1), (2, 3), …

    Every position has a row of cosines and sines in the model's table. Rotating by the inverse of the old row and then
    by the new row gives what the model computes at the new position, whatever scaling made the table. The rows are
    rounded, so their squares sum to only nearly 1: the inverse divides by that sum.
    """

    rotary: Any
    """The model's rotary embedding. Its table is read each time: vLLM replaces it when it changes the dtype."""
    dtype: torch.dtype
    """Dtype of the model's activations, to which vLLM casts the table."""
    first: int
    rotary_dim: int
    layout: RotationLayout

    @property
    def table(self) -> Tensor:
        """[positions, R], cosines then sines; the forward uses them in the dtype of `rows`."""
        rotary = self.rotary
        both = getattr(rotary, "long_short_cos_sin_cache", None)
        if both is not None:  # short rows, then long ones; the forward uses one of the two for every position
            short = rotary.original_max_position_embeddings
            rows: Tensor = both[short:] if rotary.use_long_rope else both[:short]
            return rows
        table: Tensor = rotary.cos_sin_cache
        return table

    @property
    def num_positions(self) -> int:
        """Number of positions in the table."""
        return len(self.table)

    def rows(self, positions: Tensor) -> Tensor:
        """[T, R], the rows of T positions, rounded as the forward rounds them."""
        rows = self.table[positions]
        return rows if getattr(self.rotary, "use_flashinfer", False) else rows.to(self.dtype)

    def require(self, position: int) -> None:
        """Raises `PromptTooLong` if the table has no such position."""
        if not 0 <= position < self.num_positions:
            raise PromptTooLong(
                f"a key is moved to position {position}; the model's rotary table has {self.num_positions} positions: "
                "send a shorter prompt, or start vLLM with a larger --max-model-len"
            )

    def factors(self, old: Tensor, new: Tensor, dtype: torch.dtype = torch.float32) -> Factors:
        """Computes the rotation factors of T keys.

        Args:
            old: [T] positions at which the keys were computed.
            new: [T] target positions; both inside the table (`require`).
            dtype: dtype of the arithmetic.
        """
        half = self.rotary_dim // 2
        before, after = self.rows(old).to(dtype)[:, None], self.rows(new).to(dtype)[:, None]
        cos0, sin0, cos1, sin1 = before[..., :half], before[..., half:], after[..., :half], after[..., half:]
        size = cos0 * cos0 + sin0 * sin0
        return Factors((cos1 * cos0 + sin1 * sin0) / size, (sin1 * cos0 - cos1 * sin0) / size)

    def rotate(self, keys: Tensor, factors: Factors) -> None:
        """Rotates keys in place.

        Args:
            keys: [T, G, D]; not a view of the cache.
            factors: factors of T keys. The arithmetic uses their dtype and is rounded once, to that of the keys.
        """
        part = keys[..., self.first : self.first + self.rotary_dim]
        one, other = paired(part, self.layout)
        x, y = one.to(factors.cos.dtype), other.to(factors.cos.dtype)
        turned_x = x * factors.cos - y * factors.sin
        other.copy_(torch.addcmul(y * factors.cos, x, factors.sin))
        one.copy_(turned_x)


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic that rotates keys of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rotates_text_by_one_row(rotary: Any, dtype: torch.dtype) -> bool:
    """Whether an embedding of several positions per token (M-RoPE) rotates as by one position where all are equal.

    Text has equal ones: its time, height and width are its index. Checked with vectors of ones at positions far apart,
    in the embedding's own code for torch, which has no kernel of a device.
    """
    table: Tensor = rotary.cos_sin_cache
    positions = torch.linspace(0, len(table) - 1, 9, device=table.device).long()
    ones = torch.ones(len(positions), int(rotary.head_size), dtype=dtype, device=table.device)
    num_dims = max(len(rotary.mrope_section), 3)
    one = rotary.forward_native(positions, ones.clone(), ones.clone())
    several = rotary.forward_native(positions.expand(num_dims, -1), ones.clone(), ones.clone())
    return all(torch.equal(x, y) for x, y in zip(one, several, strict=True))


def find_key_rotation(layer_name: str, rotary: Any, dtype: torch.dtype, key_size: int, *, at_end: bool) -> KeyRotation:
    """Reads the rotation of a vLLM rotary embedding.

    Args:
        layer_name: for error messages.
        rotary: a module of `vllm.model_executor.layers.rotary_embedding`.
        dtype: dtype of the model's activations.
        key_size: D, the head size of a key.
        at_end: the rotary part is the last of the key, not the first.

    Raises:
        NotMovable: an embedding whose rotation of text is not one row of cosines and sines per position.
    """
    kind = type(rotary).__name__
    table = getattr(rotary, "long_short_cos_sin_cache", None)
    table = getattr(rotary, "cos_sin_cache", None) if table is None else table
    rotary_dim = int(getattr(rotary, "rotary_dim", 0))
    if not isinstance(table, Tensor) or not table.is_floating_point() or table.dim() != 2:
        raise NotMovable(f"{layer_name} turns keys by {kind}, which has no table of one row per position")
    if table.shape[1] != rotary_dim or not 0 < rotary_dim <= key_size or rotary_dim % 2:
        raise NotMovable(
            f"{layer_name}: {kind} has rows of {table.shape[1]} numbers for {rotary_dim} rotary dimensions of a key of "
            f"{key_size}; expected as many numbers as rotary dimensions"
        )
    if getattr(rotary, "mrope_section", None) is not None and not rotates_text_by_one_row(rotary, dtype):
        raise NotMovable(
            f"{layer_name} rotates keys by several positions per token ({kind}), and those of text not as by one; such "
            "models cannot be composed"
        )
    return KeyRotation(
        rotary,
        dtype,
        first=key_size - rotary_dim if at_end else 0,
        rotary_dim=rotary_dim,
        layout="half" if getattr(rotary, "is_neox_style", True) else "interleaved",
    )
