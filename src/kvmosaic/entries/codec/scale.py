"""Scales: two bytes each, rounded so that codes never run out, and so that decoded numbers have the same scale again.

A chunk may leave and come back many times. What is decoded and encoded again must give the same codes, or its error
would grow with every turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16
"""The range of float32, in two bytes. Its coarse steps do no harm: codes are computed with the rounded scale."""
_SMALLEST = 1e-30
"""A group of zeros has this scale, so that dividing by it is possible."""


def rounded(scales: Tensor) -> Tensor:
    """[...] bfloat16, the nearest: at most 2**-8 of it away, so the largest code, of up to 127, by less than 0.5."""
    return scales.clamp(min=_SMALLEST).to(SCALE_DTYPE)


def rounded_down(offsets: Tensor) -> Tensor:
    """[...] bfloat16, each the largest that is at most the float32 given."""
    nearest = offsets.to(SCALE_DTYPE)
    lower = torch.nextafter(nearest, torch.tensor(-torch.inf, dtype=SCALE_DTYPE))
    return torch.where(nearest.to(torch.float32) > offsets, lower, nearest)


def are_usable(largest: Tensor, dtype: torch.dtype) -> bool:
    """Whether all of these sizes are finite, and twice as much is still a number of `dtype`."""
    return bool((largest <= 0.4 * torch.finfo(dtype).max).all())
