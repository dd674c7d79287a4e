"""Random adapters for tiny models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kvmosaic.model.lora import LoraAdapter
from kvmosaic.model.lora.adapter import LowRank

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def random_adapter(
    module: Any, seed: int = 0, targets: Sequence[str] = ATTENTION, *, rank: int = 3, size: float = 0.2
) -> LoraAdapter:
    """An adapter of a model's linear layers, large enough that every answer differs."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and name.endswith(tuple(targets)):
            down = torch.randn(rank, part.in_features, generator=generator, dtype=torch.float64)
            up = torch.randn(part.out_features, rank, generator=generator, dtype=torch.float64) * size
            layers[name] = LowRank(down, up, 0.5)
    assert layers
    return LoraAdapter(layers)
