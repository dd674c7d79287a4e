"""Random models with what trained weights have and random ones lack."""

from __future__ import annotations

from typing import Any

import torch

from support.families import build


def sensitive_model(dtype: torch.dtype, num_layers: int = 16, sharpness: float = 8.0) -> Any:
    """A deep Llama with sharp attention, in which rounding grows from layer to layer as in trained models."""
    module = build("llama", dtype, num_hidden_layers=num_layers)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.q_proj.weight *= sharpness
    return module
