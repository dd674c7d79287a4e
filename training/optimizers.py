"""Optimizers and resumable checkpoints, stored as safetensors."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms, one factor on both rates."""

    def __init__(self, model: nn.Module, matrix_rate: float, other_rate: float) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
        self.rates = (matrix_rate, other_rate)
        self.muon = torch.optim.Muon(
            matrices, lr=matrix_rate, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        self.adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0.0)

    def step(self, factor: float) -> None:
        """Applies the gradients with the rates times `factor`, and clears them."""
        for optimizer, rate in zip((self.muon, self.adam), self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """The state of both optimizers under the names of the parameters."""
        states = {**self.muon.state, **self.adam.state}
        return {
            f"{self.names[id(parameter)]}/{key}": value.clone()
            for parameter, values in states.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes over what `state` returned."""
        for optimizer in (self.muon, self.adam):
            for parameter in optimizer.param_groups[0]["params"]:
                prefix = self.names[id(parameter)] + "/"
                optimizer.state[parameter] = {
                    key.removeprefix(prefix): value.clone() for key, value in tensors.items() if key.startswith(prefix)
                }


def save(folder: Path, model: nn.Module, optimizers: Optimizers, record: dict[str, float]) -> None:
    """Writes a checkpoint; each file is replaced only when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for name, tensors in (("model", weights), ("optimizer", optimizers.state())):
        save_file(tensors, folder / f"{name}.new")
        (folder / f"{name}.new").replace(folder / f"{name}.safetensors")
    (folder / "record.json").write_text(json.dumps(record, indent=2))


def resume(folder: Path, model: nn.Module, optimizers: Optimizers) -> dict[str, float]:
    """Loads the checkpoint in a folder, if there is one, and returns its record."""
    if not (folder / "record.json").exists():
        return {"step": 0, "tokens": 0, "seconds": 0.0}
    model.load_state_dict(load_file(folder / "model.safetensors"))
    optimizers.load(load_file(folder / "optimizer.safetensors"))
    record: dict[str, float] = json.loads((folder / "record.json").read_text())
    return record
