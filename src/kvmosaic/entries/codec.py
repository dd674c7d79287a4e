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

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from kvmosaic.entries.header import CodecName
from kvmosaic.errors import InvalidConfig

__all__ = ["CODECS", "Along", "Codec", "Part", "Shape", "choose_codec"]


Shape: TypeAlias = tuple[int, int, int]
"""[n, G, D] of the keys or values of one layer."""
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


INT8_GROUP = 64
"""Numbers that share a scale."""


@dataclass(frozen=True, slots=True)
class Symmetric:
    """number = code * scale, where the largest number of a group has the code `top`.

    Scales are rounded before codes are computed, so the largest code may miss `top` by less than half a step, and is
    rounded to it: no code is cut off, and decoded numbers have the same scale and codes again. An error is at most half
    a step of the codes, times the scale, and the rounding of the dtype.
    """

    name: CodecName
    code_dtype: torch.dtype
    top: float
    to_codes: Callable[[Tensor], Tensor]
    """float32 from -top to top -> what is copied into codes."""
    from_codes: Callable[[Tensor], Tensor]
    """Codes -> float32."""

    def parts(self, shape: Shape, dtype: torch.dtype, along: Along) -> tuple[Part, ...]:
        """Scales, and codes of one byte."""
        return Part("scale", SCALE_DTYPE, scale_shape(shape, along, INT8_GROUP)), Part("code", self.code_dtype, shape)

    def encode(self, tensor: Tensor, along: Along) -> tuple[Tensor, ...] | None:
        """Scales and codes; None for numbers that no scale can hold."""
        shape = (tensor.shape[0], tensor.shape[1], tensor.shape[2])
        scales = torch.empty(scale_shape(shape, along, INT8_GROUP), dtype=SCALE_DTYPE)
        codes = torch.empty(shape, dtype=self.code_dtype)
        groups = grouped(tensor.contiguous(), along, INT8_GROUP)
        places = zip(grouped_scales(scales, shape, along, INT8_GROUP), grouped(codes, along, INT8_GROUP), strict=True)
        for group, (scale, code) in zip(groups, places, strict=True):
            numbers = group.to(torch.float32)
            # two passes, since torch's aminmax takes ten times as long
            largest = torch.maximum(numbers.amax(1, keepdim=True), -numbers.amin(1, keepdim=True))
            if not are_usable(largest, tensor.dtype):
                return None
            scale.copy_(rounded(largest / self.top))
            code.copy_(self.to_codes(numbers / scale.to(torch.float32)))
        return scales, codes

    def decode(self, parts: tuple[Tensor, ...], shape: Shape, dtype: torch.dtype, along: Along) -> Tensor:
        """Codes times scales."""
        scales, codes = parts
        result = torch.empty(shape, dtype=dtype)
        groups = zip(grouped(codes, along, INT8_GROUP), grouped_scales(scales, shape, along, INT8_GROUP), strict=True)
        for target, (code, scale) in zip(grouped(result, along, INT8_GROUP), groups, strict=True):
            target.copy_(self.from_codes(code).mul_(scale))
        return result


def _float8(numbers: Tensor) -> Tensor:
    return numbers.to(torch.float8_e4m3fn)


def _from_float8(codes: Tensor) -> Tensor:
    """Bits moved to where float16 has them, whose exponent starts 8 lower; torch takes 15 times as long.

    e4m3      s eeee mmm
    float16   s 0eeee mmm0000000
    """
    bits = codes.view(torch.int8).to(torch.int16)
    bits <<= 7
    bits &= -0x4001
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)


INT8 = Symmetric("int8", torch.int8, 127.0, torch.Tensor.round_, lambda codes: codes.to(torch.float32))
FP8 = Symmetric("fp8", torch.float8_e4m3fn, 448.0, _float8, _from_float8)


INT4_GROUP = 32
"""Numbers that share a scale and an offset."""
_INT4_TOP = 15.0


class Int4:
    """number = offset + code * scale, with codes from 0 to 15.

    The offset is rounded down and the scale to the nearest, which moves the last code by less than half a step. So
    every number of a group has a code, an error is at most half a scale and the rounding of the dtype, and decoded
    numbers have the same offset and scale again. 16 codes are few: codes around zero would waste up to half of them on
    a channel whose keys all have one sign.

        byte i   code i of the first half of all codes in the low bits, code i of the second half in the high ones
    """

    name: CodecName = "int4"

    def parts(self, shape: Shape, dtype: torch.dtype, along: Along) -> tuple[Part, ...]:
        """Scales, offsets and packed codes."""
        scales = scale_shape(shape, along, INT4_GROUP)
        return (
            Part("scale", SCALE_DTYPE, scales),
            Part("offset", SCALE_DTYPE, scales),
            Part("code", torch.uint8, (-(-math.prod(shape) // 2),)),
        )

    def encode(self, tensor: Tensor, along: Along) -> tuple[Tensor, ...] | None:
        """Scales, offsets and codes; None for numbers that no scale can hold."""
        shape = (tensor.shape[0], tensor.shape[1], tensor.shape[2])
        scales, offsets = torch.empty(2, *scale_shape(shape, along, INT4_GROUP), dtype=SCALE_DTYPE)
        codes = torch.empty(shape, dtype=torch.uint8)
        places = zip(
            grouped_scales(scales, shape, along, INT4_GROUP),
            grouped_scales(offsets, shape, along, INT4_GROUP),
            grouped(codes, along, INT4_GROUP),
            strict=True,
        )
        for group, (scale, offset, code) in zip(grouped(tensor.contiguous(), along, INT4_GROUP), places, strict=True):
            numbers = group.to(torch.float32)
            low, high = numbers.amin(1, keepdim=True), numbers.amax(1, keepdim=True)
            if not are_usable(torch.maximum(high, -low), tensor.dtype):
                return None
            offset.copy_(rounded_down(low))
            scale.copy_(rounded(high / _INT4_TOP - offset.to(torch.float32) / _INT4_TOP))
            steps = (numbers - offset).div_(scale).round_().clamp_(0, _INT4_TOP)
            code.copy_(steps.to(torch.int8))
        return scales, offsets, _packed(codes.view(-1))

    def decode(self, parts: tuple[Tensor, ...], shape: Shape, dtype: torch.dtype, along: Along) -> Tensor:
        """Offsets plus codes times scales."""
        scales, offsets, packed = parts
        codes = _unpacked(packed, math.prod(shape)).view(shape)
        result = torch.empty(shape, dtype=dtype)
        groups = zip(
            grouped(codes, along, INT4_GROUP),
            grouped_scales(scales, shape, along, INT4_GROUP),
            grouped_scales(offsets, shape, along, INT4_GROUP),
            strict=True,
        )
        for target, (code, scale, offset) in zip(grouped(result, along, INT4_GROUP), groups, strict=True):
            target.copy_(code.to(torch.float32).mul_(scale).add_(offset))
        return result


def _packed(codes: Tensor) -> Tensor:
    half = -(-len(codes) // 2)
    result = codes[:half].clone()
    result[: len(codes) - half] |= codes[half:] << 4
    return result


def _unpacked(packed: Tensor, count: int) -> Tensor:
    return torch.cat([packed & 15, packed >> 4])[:count]


CODECS: Mapping[CodecName, Codec] = MappingProxyType({"none": Plain(), "fp8": FP8, "int8": INT8, "int4": Int4()})


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
