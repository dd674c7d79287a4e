"""Random weights that keep numbers at a readable size."""

from __future__ import annotations

import math

import torch
from torch import nn


def randomize(model: nn.Module, seed: int) -> None:
    """Matrices that keep the size of what they multiply; norms, biases and sinks away from their neutral value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.dim() < 2:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        embeddings = model.get_input_embeddings().weight
        embeddings.mul_(math.sqrt(embeddings.shape[-1]))
