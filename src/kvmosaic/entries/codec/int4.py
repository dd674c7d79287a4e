"""Codes of 4 bits, two in a byte, with a scale and an offset per group."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvmosaic.entries.codec.codec import Along, Part, Shape
from kvmosaic.entries.codec.scale import (
    SCALE_DTYPE,
    are_usable,
    grouped,
    grouped_scales,
    rounded,
    rounded_down,
    scale_shape,
)
from kvmosaic.entries.header import CodecName

GROUP = 32
"""Numbers that share a scale and an offset."""
_TOP = 15.0


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
        scales = scale_shape(shape, along, GROUP)
        return (
            Part("scale", SCALE_DTYPE, scales),
            Part("offset", SCALE_DTYPE, scales),
            Part("code", torch.uint8, (-(-math.prod(shape) // 2),)),
        )

    def encode(self, tensor: Tensor, along: Along) -> tuple[Tensor, ...] | None:
        """Scales, offsets and codes; None for numbers that no scale can hold."""
        shape = (tensor.shape[0], tensor.shape[1], tensor.shape[2])
        scales, offsets = torch.empty(2, *scale_shape(shape, along, GROUP), dtype=SCALE_DTYPE)
        codes = torch.empty(shape, dtype=torch.uint8)
        places = zip(
            grouped_scales(scales, shape, along, GROUP),
            grouped_scales(offsets, shape, along, GROUP),
            grouped(codes, along, GROUP),
            strict=True,
        )
        for group, (scale, offset, code) in zip(grouped(tensor.contiguous(), along, GROUP), places, strict=True):
            numbers = group.to(torch.float32)
            low, high = numbers.amin(1, keepdim=True), numbers.amax(1, keepdim=True)
            if not are_usable(torch.maximum(high, -low), tensor.dtype):
                return None
            offset.copy_(rounded_down(low))
            scale.copy_(rounded(high / _TOP - offset.to(torch.float32) / _TOP))
            steps = (numbers - offset).div_(scale).round_().clamp_(0, _TOP)
            code.copy_(steps.to(torch.int8))
        return scales, offsets, _packed(codes.view(-1))

    def decode(self, parts: tuple[Tensor, ...], shape: Shape, dtype: torch.dtype, along: Along) -> Tensor:
        """Offsets plus codes times scales."""
        scales, offsets, packed = parts
        codes = _unpacked(packed, math.prod(shape)).view(shape)
        result = torch.empty(shape, dtype=dtype)
        groups = zip(
            grouped(codes, along, GROUP),
            grouped_scales(scales, shape, along, GROUP),
            grouped_scales(offsets, shape, along, GROUP),
            strict=True,
        )
        for target, (code, scale, offset) in zip(grouped(result, along, GROUP), groups, strict=True):
            target.copy_(code.to(torch.float32).mul_(scale).add_(offset))
        return result


def _packed(codes: Tensor) -> Tensor:
    half = -(-len(codes) // 2)
    result = codes[:half].clone()
    result[: len(codes) - half] |= codes[half:] << 4
    return result


def _unpacked(packed: Tensor, count: int) -> Tensor:
    return torch.cat([packed & 15, packed >> 4])[:count]
