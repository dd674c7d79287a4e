"""No codec: numbers as they are, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from kvmosaic.entries.codec.codec import Along, Part, Shape
from kvmosaic.entries.header import CodecName


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
