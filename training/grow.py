"""Readers that start as others: one with a layer more, which changes nothing at first, or one with states."""

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


def convert(model: Reader, folder: Path) -> None:
    """Loads what a Qwen3.5 can take of a Llama of as many layers: all but the attention of its layers with a state.

    Gates start at a half, for which outputs are doubled; queries and keys, which this family normalises, are scaled to
    the size that random states give them.
    """
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    own = model.state_dict()
    moved = {}
    for name, value in weights.items():
        if name.endswith("norm.weight"):
            moved[name] = value - 1
        elif name.endswith("q_proj.weight"):
            heads = value.view(model.config.heads, 1, model.config.head_size, -1)
            moved[name] = torch.cat((heads, torch.zeros_like(heads)), 1).reshape(-1, value.shape[1])
        else:
            moved[name] = value * 2 if name.endswith("o_proj.weight") else value
        for part in ("q", "k"):
            if name.endswith(f"{part}_proj.weight"):
                norm = weights[name.replace(f"self_attn.{part}_proj", "input_layernorm")]
                size = (value * norm).pow(2).sum(1).mean().sqrt()
                moved[name.replace("_proj", "_norm")] = (size - 1).expand(model.config.head_size).clone()
    model.load_state_dict({name: value for name, value in moved.items() if name in own}, strict=False)
