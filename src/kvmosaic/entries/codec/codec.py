"""Codecs: how numbers become fewer bytes, and numbers again; and no codec, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from kvmosaic.entries.header import CodecName

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
