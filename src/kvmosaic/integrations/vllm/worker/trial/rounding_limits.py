"""Rounding limits: distances between numbers that were computed in two valid ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ARITHMETIC = 2.0**-20
"""Error of sums in float32, whatever the dtype of their terms."""


def unit(*dtypes: torch.dtype) -> float:
    """The relative error of one rounding to the coarsest of these dtypes, plus that of the arithmetic before it."""
    return max(torch.finfo(dtype).eps for dtype in dtypes) / 2 + _ARITHMETIC


def wide(numbers: Tensor) -> Tensor:
    """Numbers in a dtype in which comparing them adds no rounding."""
    return numbers.float() if numbers.dtype in (torch.bfloat16, torch.float16) else numbers.double()


def perturbed(numbers: Tensor, seed: int = 0) -> Tensor:
    """Floating-point numbers, each moved up or down by about one rounding; the same on every worker."""
    signs = torch.randint(2, numbers.shape, generator=torch.Generator().manual_seed(seed)).to(numbers.device) * 2 - 1
    return (wide(numbers) * (1 + 2 * unit(numbers.dtype) * signs)).to(numbers.dtype)


def noise_ratio(found: Sequence[Tensor], wanted: Sequence[Tensor], noisy: Sequence[Tensor]) -> float:
    """The distance of `found` from `wanted`, divided by that of `noisy`; infinite if it is not finite.

    Args:
        found: tensors [T, …].
        wanted: the same by another computation.
        noisy: the same by the other computation again, after its input was `perturbed`.

    Some channels of a model are many times larger than all others and hide them: each is normalized by its own size,
    and the median counts.
    """
    largest = 0.0
    for one, other, third in zip(found, wanted, noisy, strict=True):
        a, b, c = (wide(each).flatten(1) for each in (one, other, third))
        if not a.isfinite().all():
            return float("inf")
        allowed = _size(c - b) + unit(other.dtype) * _size(b)
        largest = max(largest, float((_size(a - b) / allowed.clamp(min=1e-30)).median()))
    return largest


def _size(numbers: Tensor) -> Tensor:
    """[C]: the size of each channel of [T, C]."""
    return numbers.square().mean(0).sqrt()
