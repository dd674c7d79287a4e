"""Adapters of a model: linear layers with low-rank updates for the rows of their adapter, or with merged weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.errors import InvalidAdapter
from kvmosaic.model.lora.adapter import LoraAdapter, LowRank


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


__all__ = ["AdaptedRows", "adapter_scope", "attach", "computes_keys_of_base", "merge", "uncalled_layers"]

_LAYER = re.compile(r"\.(\d+)\.")
_AFTER_ATTENTION_KEYS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of the last decoder layer whose outputs no key or value depends on."""


@contextmanager
def adapter_scope(rows: Sequence[AdaptedRows]) -> Iterator[None]:
    """Context in which rows of each forward are computed by their adapters."""
    token = current_rows.set(tuple(rows))
    try:
        yield
    finally:
        current_rows.reset(token)


def attach(module: Any, adapter: LoraAdapter) -> None:
    """Adds an adapter to a transformers model; without `adapter_scope`, its results stay those of the base.

    Raises:
        InvalidAdapter: it is for another model; nothing has been changed then.
    """
    dtype = module.get_input_embeddings().weight.dtype
    for name, layer in _checked(module, adapter):
        found = module.get_submodule(name)
        if not isinstance(found, LoraLinear):
            parent, _, child = name.rpartition(".")
            wrapped = LoraLinear(found)
            setattr(module.get_submodule(parent), child, wrapped)
            found = wrapped
        found.add(adapter.digest, layer, dtype, _device(found.base))


def uncalled_layers(module: Any, forward: Callable[[], object]) -> list[str]:
    """Names of adapted layers that a forward does not call: the model reads their weights itself, without the update.

    Experts are left out: which of them are called depends on the tokens.
    """
    called: set[str] = set()
    layers = {name: part for name, part in module.named_modules() if isinstance(part, LoraLinear)}
    hooks = [part.register_forward_hook(lambda *_, name=name: called.add(name)) for name, part in layers.items()]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return sorted(name for name in layers if name not in called and ".experts." not in name)


@torch.no_grad()
def merge(module: Any, adapter: LoraAdapter) -> None:
    """Adds an adapter's updates to the weights, rounded once to their dtype.

    Raises:
        InvalidAdapter: it is for another model, or the weights are quantized; nothing has been changed then.
    """
    for name, _ in _checked(module, adapter):
        linear = module.get_submodule(name)
        if type(linear) is not nn.Linear:
            raise InvalidAdapter(
                f"the weights of {name} are {type(linear).__name__}, to which no update can be added; keep the adapter "
                "beside them (without merging)"
            )
    for name, layer in adapter.layers.items():
        weight: Tensor = module.get_submodule(name).weight
        change = layer.up.double() @ layer.down.double() * layer.scale
        weight.copy_((weight.double() + change.to(weight.device)).to(weight.dtype))


def computes_keys_of_base(adapter: LoraAdapter, num_layers: int) -> bool:
    """Whether keys and values provably do not depend on an adapter: chunks of the base model are the same then.

    They do not if every update is zero, or belongs to what follows the keys and values of the last layer.
    """
    return adapter.changes_nothing or all(
        name.endswith(_AFTER_ATTENTION_KEYS) and _layer_of(name) == num_layers - 1 for name in adapter.layers
    )


def _layer_of(name: str) -> int | None:
    found = _LAYER.findall(f".{name}.")
    return int(found[0]) if len(found) == 1 else None


def _checked(module: Any, adapter: LoraAdapter) -> list[tuple[str, LowRank]]:
    """The updates, all of which fit."""
    for name, layer in adapter.layers.items():
        try:
            linear = module.get_submodule(name)
        except AttributeError as error:
            raise InvalidAdapter(
                f"the adapter changes {name!r:.200}, and {type(module).__name__} has no such layer; it was trained for "
                "another model"
            ) from error
        linear = linear.base if isinstance(linear, LoraLinear) else linear
        shape = getattr(linear, "in_features", None), getattr(linear, "out_features", None)
        if shape != (layer.down.shape[1], layer.up.shape[0]):
            raise InvalidAdapter(
                f"the adapter changes {name!r:.200} from {layer.down.shape[1]} to {layer.up.shape[0]} numbers, and "
                f"that layer goes from {shape[0]} to {shape[1]}; it was trained for another model"
            )
    return list(adapter.layers.items())


def _device(linear: nn.Module) -> torch.device:
    tensors = [*linear.parameters(), *linear.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")
