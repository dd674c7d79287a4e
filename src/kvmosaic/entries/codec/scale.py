"""Scales: which numbers of [n, G, D] share one, and how it is stored.

    along tokens     K [n, G, D] -> [n / S, S, G*D] and the rest [1, n % S, G*D]     scales [ceil(n / S), G, D]
    along channels   V [n, G, D] -> [n*G*D / S, S, 1]                                scales [n, G, D / S]

Channels of keys differ a lot from each other and little from token to token, so one scale serves a channel of many
tokens (KIVI, arXiv:2402.02750). Values have no such channels; one scale serves one token. A latent is key and value in
one, and counts as a value.

A scale has two bytes, rounded so that codes never run out, and so that decoded numbers have the same scale again. A
chunk may leave and come back many times. What is decoded and encoded again must give the same codes, or its error
would grow with every turn.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvmosaic.entries.codec.codec import Along, Shape

SCALE_DTYPE = torch.bfloat16
"""The range of float32, in two bytes. Its coarse steps do no harm: codes are computed with the rounded scale."""
_SMALLEST = 1e-30
"""A group of zeros has this scale, so that dividing by it is possible."""


def group_size(width: int, most: int) -> int:
    """Channels per group: the largest equal parts of at most `most`; all of them where only small parts are equal."""
    return next((size for size in range(min(most, width), most // 2, -1) if width % size == 0), width)


def scale_shape(shape: Shape, along: Along, most: int) -> Shape:
    """The shape of the scales of a tensor."""
    tokens, heads, width = shape
    if along == "tokens":
        return (-(-tokens // most), heads, width)
    return (tokens, heads, width // group_size(width, most))


def grouped(tensor: Tensor, along: Along, most: int) -> Iterator[Tensor]:
    """Views [groups, S, numbers side by side] that together are the whole tensor."""
    tokens, heads, width = tensor.shape
    if along == "channels":
        size = group_size(width, most)
        yield tensor.view(tokens * heads * (width // size), size, 1)
        return
    full = tokens // most * most
    if full:
        yield tensor[:full].view(full // most, most, heads * width)
    if full < tokens:
        yield tensor[full:].view(1, tokens - full, heads * width)


def grouped_scales(scales: Tensor, shape: Shape, along: Along, most: int) -> Iterator[Tensor]:
    """Views [groups, 1, numbers side by side] of the scales, in the order of `grouped`."""
    tokens, heads, width = shape
    if along == "channels":
        yield scales.view(-1, 1, 1)
        return
    full = tokens // most
    if full:
        yield scales[:full].view(full, 1, heads * width)
    if tokens % most:
        yield scales[full:].view(1, 1, heads * width)


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
