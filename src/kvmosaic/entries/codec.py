"""Codecs: fewer bytes for keys and values, at a measured loss. To add one: write its class, and add it to `CODECS`.

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from kvmosaic.entries.header import CodecName
from kvmosaic.errors import InvalidConfig

__all__ = ["CODECS", "Along", "Codec", "Part", "Shape", "choose_codec"]


Shape: TypeAlias = tuple[int, ...]
"""[n, G, D] of the keys or values of one layer; any of a state, which is kept as it is."""
Along: TypeAlias = Literal["tokens", "channels"]
"""Which numbers share a scale: one channel of neighbouring tokens (keys), or neighbouring channels of one token."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of an encoded tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize


class Codec(Protocol):
    """Turns [n, G, D] into parts whose shapes follow from n, G, D alone.

    Always safe: encoding what came out of `decode`; one token; any number of heads and channels.
    """

    @property
    def name(self) -> CodecName:
        """What configuration and entries call it."""
        ...

    def parts(self, shape: Shape, dtype: torch.dtype, along: Along) -> tuple[Part, ...]:
        """The parts of a tensor of this shape and dtype, in order."""
        ...

    def encode(self, tensor: Tensor, along: Along) -> tuple[Tensor, ...] | None:
        """The parts; None if there are numbers that no scale can hold: not finite, or near the end of the dtype."""
        ...

    def decode(self, parts: tuple[Tensor, ...], shape: Shape, dtype: torch.dtype, along: Along) -> Tensor:
        """[n, G, D] again, in `dtype`."""
        ...


class Plain:
    """Keeps every bit; decoding copies nothing."""

    name: CodecName = "none"

    def parts(self, shape: Shape, dtype: torch.dtype, along: Along) -> tuple[Part, ...]:
        """The tensor itself."""
        return (Part("", dtype, shape),)

    def encode(self, tensor: Tensor, along: Along) -> tuple[Tensor, ...]:
        """The tensor itself."""
        return (tensor,)

    def decode(self, parts: tuple[Tensor, ...], shape: Shape, dtype: torch.dtype, along: Along) -> Tensor:
        """The tensor itself."""
        return parts[0]


SCALE_DTYPE = torch.bfloat16
"""The range of float32, in two bytes. Its coarse steps do no harm: codes are computed with the rounded scale."""
GROUP = 64
"""Numbers that share a scale."""
_TOP = 127.0
"""The code of the largest number of a group."""
_SMALLEST = 1e-30
"""A group of zeros has this scale, so that dividing by it is possible."""


def group_size(width: int) -> int:
    """Channels per group: the largest equal parts of at most `GROUP`; all of them where only small parts are equal."""
    return next((size for size in range(min(GROUP, width), GROUP // 2, -1) if width % size == 0), width)


def scale_shape(shape: Shape, along: Along) -> Shape:
    """The shape of the scales of a tensor."""
    tokens, heads, width = shape
    if along == "tokens":
        return (-(-tokens // GROUP), heads, width)
    return (tokens, heads, width // group_size(width))


def grouped(tensor: Tensor, along: Along) -> Iterator[Tensor]:
    """Views [groups, S, numbers side by side] that together are the whole tensor."""
    tokens, heads, width = tensor.shape
    if along == "channels":
        size = group_size(width)
        yield tensor.view(tokens * heads * (width // size), size, 1)
        return
    full = tokens // GROUP * GROUP
    if full:
        yield tensor[:full].view(full // GROUP, GROUP, heads * width)
    if full < tokens:
        yield tensor[full:].view(1, tokens - full, heads * width)


def grouped_scales(scales: Tensor, shape: Shape, along: Along) -> Iterator[Tensor]:
    """Views [groups, 1, numbers side by side] of the scales, in the order of `grouped`."""
    tokens, heads, width = shape
    if along == "channels":
        yield scales.view(-1, 1, 1)
        return
    full = tokens // GROUP
    if full:
        yield scales[:full].view(full, 1, heads * width)
    if tokens % GROUP:
        yield scales[full:].view(1, 1, heads * width)


class Int8:
    """number = code * scale, where the largest number of a group has the code 127.

    A scale is rounded to the nearest before codes are computed: it is at most 2**-8 of itself away, so the largest code
    misses 127 by less than 0.5, and is rounded to it. No code is cut off, and decoded numbers have the same scale and
    codes again. An error is at most half a scale and the rounding of the dtype.
    """

    name: CodecName = "int8"

    def parts(self, shape: Shape, dtype: torch.dtype, along: Along) -> tuple[Part, ...]:
        """Scales, and codes of one byte."""
        return Part("scale", SCALE_DTYPE, scale_shape(shape, along)), Part("code", torch.int8, shape)

    def encode(self, tensor: Tensor, along: Along) -> tuple[Tensor, ...] | None:
        """Scales and codes; None for numbers that no scale can hold."""
        shape = (tensor.shape[0], tensor.shape[1], tensor.shape[2])
        scales = torch.empty(scale_shape(shape, along), dtype=SCALE_DTYPE)
        codes = torch.empty(shape, dtype=torch.int8)
        limit = 0.4 * torch.finfo(tensor.dtype).max  # twice as much is still a number
        places = zip(grouped_scales(scales, shape, along), grouped(codes, along), strict=True)
        for group, (scale, code) in zip(grouped(tensor.contiguous(), along), places, strict=True):
            numbers = group.to(torch.float32)
            # two passes, since torch's aminmax takes ten times as long
            largest = torch.maximum(numbers.amax(1, keepdim=True), -numbers.amin(1, keepdim=True))
            if not (largest <= limit).all():  # nor is NaN
                return None
            scale.copy_((largest / _TOP).clamp_(min=_SMALLEST))
            code.copy_((numbers / scale.to(torch.float32)).round_())
        return scales, codes

    def decode(self, parts: tuple[Tensor, ...], shape: Shape, dtype: torch.dtype, along: Along) -> Tensor:
        """Codes times scales."""
        scales, codes = parts
        result = torch.empty(shape, dtype=dtype)
        groups = zip(grouped(codes, along), grouped_scales(scales, shape, along), strict=True)
        for target, (code, scale) in zip(grouped(result, along), groups, strict=True):
            target.copy_(code.to(torch.float32).mul_(scale))
        return result


CODECS: Mapping[CodecName, Codec] = MappingProxyType({"none": Plain(), "int8": Int8()})


def choose_codec(name: str, dtype: torch.dtype) -> Codec:
    """The codec of this name, for keys and values of this dtype.

    Raises:
        InvalidConfig: no such codec, or one that would throw away what float64 is used for.
    """
    found = next((codec for known, codec in CODECS.items() if known == name), None)
    if found is None:
        raise InvalidConfig(f"codec is {name!r:.80}; choose one of {', '.join(CODECS)}")
    if dtype == torch.float64 and found.name != "none":
        raise InvalidConfig(
            f"codec is {name!r}, but the model computes in float64, of which it would keep 2 digits; "
            "use codec 'none', or load the model in float32 or bfloat16"
        )
    return found
