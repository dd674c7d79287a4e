"""Groups: which numbers of [n, G, D] share a scale.

    along tokens     K [n, G, D] -> [n / S, S, G*D] and the rest [1, n % S, G*D]     scales [ceil(n / S), G, D]
    along channels   V [n, G, D] -> [n*G*D / S, S, 1]                                scales [n, G, D / S]

Channels of keys differ a lot from each other and little from token to token, so one scale serves a channel of many
tokens (KIVI, arXiv:2402.02750). Values have no such channels; one scale serves one token. A latent is key and value in
one, and counts as a value.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kvmosaic.entries.codec.codec import Along, Shape


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
