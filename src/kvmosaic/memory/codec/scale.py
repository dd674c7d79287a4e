"""Scales: two bytes each, rounded so that codes never run out."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16
"""The range of float32, in two bytes. Its coarse steps do no harm: codes are computed with the rounded scale."""
_WIDEN = 1 + 2.0**-8
"""A bfloat16 is at most 2**-9 of a number away from it."""
_SMALLEST = 1e-30
"""A group of zeros has this scale, so that dividing by it is possible."""


def rounded_up(scales: Tensor) -> Tensor:
    """[...] bfloat16, each at least as large as the float32 given, by at most 1%."""
    return (scales * _WIDEN).clamp_(min=_SMALLEST).to(SCALE_DTYPE)


def rounded_down(offsets: Tensor) -> Tensor:
    """[...] bfloat16, each at most the float32 given, by at most 1% of its size."""
    return (offsets - offsets.abs() * (_WIDEN - 1)).to(SCALE_DTYPE)


def are_usable(largest: Tensor, dtype: torch.dtype) -> bool:
    """Whether all of these sizes are finite, and twice as much is still a number of `dtype`."""
    return bool((largest <= 0.4 * torch.finfo(dtype).max).all())
