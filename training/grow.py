"""A reader with more layers that starts as one with fewer: the new layers change nothing at first."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from training.model import Layer, Reader
from training.pointers import HOP_LAYER


def grow(model: Reader, folder: Path) -> None:
    """Loads the weights of a model folder with one layer less; the layer that finds names in between is the new one.

    The new layer writes zeros into the stream, so the grown reader gives the same logits.
    """
    weights = load_file(folder / "model.safetensors")
    moved = {}
    for name, value in weights.items():
        parts = name.split(".")
        if parts[1] == "layers" and int(parts[2]) >= HOP_LAYER:
            parts[2] = str(int(parts[2]) + 1)
        moved[".".join(parts)] = value.float()
    missing, unexpected = model.load_state_dict(moved, strict=False)
    new = f"model.layers.{HOP_LAYER}."
    if unexpected or any(not name.startswith(new) for name in missing):
        raise ValueError(f"{folder} does not hold a reader with one layer less: {[*missing, *unexpected][:3]}")
    layer = model.model.layers[HOP_LAYER]
    assert isinstance(layer, Layer)
    with torch.no_grad():
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
