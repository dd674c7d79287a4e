"""Linear layer with low-rank updates: each row of a forward gets that of its own adapter, or none."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvmosaic.model.lora.adapter import LowRank


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Consecutive rows of a forward that one adapter computes; `rows` may be all of them."""

    digest: str
    rows: slice


current_rows: ContextVar[tuple[AdaptedRows, ...]] = ContextVar("kvmosaic_adapted_rows", default=())
"""Rows of the current forward with an adapter; those of none are the base model's."""


class LoraLinear(nn.Module):
    """A linear layer and its updates, by the digest of their adapter."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.ParameterDict()
        self.up = nn.ParameterDict()
        self._scales: dict[str, float] = {}

    def add(self, digest: str, layer: LowRank, dtype: torch.dtype, device: torch.device) -> None:
        """Adds the update of an adapter, in the dtype of the model."""
        self.down[digest] = nn.Parameter(layer.down.to(device, dtype), requires_grad=False)
        self.up[digest] = nn.Parameter(layer.up.to(device, dtype), requires_grad=False)
        self._scales[digest] = layer.scale

    def update_of(self, digest: str) -> LowRank:
        """The update of an adapter."""
        return LowRank(self.down[digest], self.up[digest], self._scales[digest])

    def forward(self, rows: Tensor) -> Tensor:
        """[..., T, in] -> [..., T, out]."""
        result: Tensor = self.base(rows)
        for adapted in self._of(current_rows.get()):
            layer = self.update_of(adapted.digest)
            part = rows[..., adapted.rows, :]
            change = nn.functional.linear(nn.functional.linear(part, layer.down), layer.up) * layer.scale
            if part.shape == rows.shape:
                result = result + change
            else:
                result[..., adapted.rows, :] += change
        return result

    def _of(self, adapted: Iterable[AdaptedRows]) -> list[AdaptedRows]:
        return [each for each in adapted if each.digest in self._scales]
