"""Layer specifications: what the engine must know about each attention layer of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvmosaic.attention.bias import DistanceBias
from kvmosaic.rope import Rotation

MaskKind = Literal["full", "window", "chunked"]


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """The earlier positions that a token sees in a layer, by position as the reader sees it.

    full       every k <= q
    window     q - k < size
    chunked    q // size == k // size
    """

    kind: MaskKind = "full"
    size: int = 0
    """Positions in the window or chunk; 0 for a full mask."""

    def __post_init__(self) -> None:
        assert (self.kind == "full") == (self.size == 0) and self.size >= 0, "only windows and chunks have a size"

    def __str__(self) -> str:
        return "full" if self.kind == "full" else f"{self.kind} {self.size}"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention call per forward: its heads, its rotation, its mask and the source of its keys.

    With `value_in_key` (latent attention, MLA) there is one key head, the latent followed by its rotary part, and the
    value is the first `value_dim` numbers of the key: only keys are stored.
    """

    index: int
    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    rotation: Rotation | None
    """None: no positions (NoPE), or positions that cannot be moved."""
    is_movable: bool
    immovable_reason: str
    mask: MaskSpec
    source_layer: int
    """The layer whose keys and values are read; differs from `index` in layers that share them."""
    value_in_key: bool = False
    bias: DistanceBias | None = None
    """Bias added to scores by distance (ALiBi)."""

    @property
    def is_stored(self) -> bool:
        """Whether this layer stores keys of its own."""
        return self.source_layer == self.index

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that this layer keeps per token; 0 when it reads another layer's keys."""
        if not self.is_stored:
            return 0
        width = self.key_dim if self.value_in_key else self.key_dim + self.value_dim
        return self.num_kv_heads * width * dtype.itemsize
