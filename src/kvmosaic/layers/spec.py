"""Layer specifications: what the engine must know about each attention layer of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvmosaic.layers.bias import DistanceBias
from kvmosaic.layers.geometry import LayerShape
from kvmosaic.rope import Rotation


@dataclass(frozen=True, slots=True)
class LayerSpec(LayerShape):
    """One attention call per forward: its heads, its rotation, its mask and the source of its keys."""

    rotation: Rotation | None = None
    """None: no positions (NoPE), or positions that cannot be moved."""
    is_movable: bool = True
    """Whether keys may be read at another position than the one they were computed at."""
    immovable_reason: str = ""
    bias: DistanceBias | None = None
    """Bias added to scores by distance (ALiBi)."""

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that this layer keeps per token; 0 when it reads another layer's keys."""
        return self.kept_per_token * dtype.itemsize
