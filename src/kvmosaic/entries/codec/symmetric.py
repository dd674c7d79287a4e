"""Codecs with one scale per group and codes around zero: 8-bit whole numbers, and 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmosaic.entries.codec.codec import Along, Part, Shape
from kvmosaic.entries.codec.scale import SCALE_DTYPE, are_usable, grouped, grouped_scales, rounded, scale_shape
from kvmosaic.entries.header import CodecName

GROUP = 64
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
        return Part("scale", SCALE_DTYPE, scale_shape(shape, along, GROUP)), Part("code", self.code_dtype, shape)

    def encode(self, tensor: Tensor, along: Along) -> tuple[Tensor, ...] | None:
        """Scales and codes; None for numbers that no scale can hold."""
        shape = (tensor.shape[0], tensor.shape[1], tensor.shape[2])
        scales = torch.empty(scale_shape(shape, along, GROUP), dtype=SCALE_DTYPE)
        codes = torch.empty(shape, dtype=self.code_dtype)
        groups = grouped(tensor.contiguous(), along, GROUP)
        places = zip(grouped_scales(scales, shape, along, GROUP), grouped(codes, along, GROUP), strict=True)
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
        groups = zip(grouped(codes, along, GROUP), grouped_scales(scales, shape, along, GROUP), strict=True)
        for target, (code, scale) in zip(grouped(result, along, GROUP), groups, strict=True):
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
