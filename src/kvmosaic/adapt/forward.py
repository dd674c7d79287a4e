"""Forwards of packed rows: logits and hidden states of the rows that count, with or without an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvmosaic.adapt.attention import PackedAttention
from kvmosaic.adapt.rows import PackedRows
from kvmosaic.model import LoadedModel
from kvmosaic.model.hook import attention_scope
from kvmosaic.model.lora import AdaptedRows, adapter_scope


@dataclass(frozen=True, slots=True)
class Outputs:
    """Results of a forward, for R chosen rows.

    logits: [R, V]
    hidden: outputs [R, D] of each decoder layer, where asked for
    """

    logits: Tensor
    hidden: list[Tensor] = field(default_factory=list)


def forward(
    model: LoadedModel, packed: PackedRows, rows: Tensor, adapter: str = "", *, keeps_hidden: bool = False
) -> Outputs:
    """One forward; gradients are kept as torch's current mode says.

    Args:
        model: the model, whose module may hold the adapter.
        packed: the rows.
        rows: [R], those whose results are needed.
        adapter: digest of the adapter that computes all rows; empty: the base model.
        keeps_hidden: whether outputs of the decoder layers are needed, too.
    """
    device = model.device
    attention = PackedAttention(model.layers, packed.mask.to(device), packed.positions.to(device))
    adapted = [AdaptedRows(adapter, slice(0, len(packed.token_ids)))] if adapter else []
    arguments: dict[str, Any] = {"logits_to_keep": rows.to(device)} if model.keeps_rows else {}
    hidden: list[Tensor] = []
    layers = decoder_layers(model) if keeps_hidden else ()
    with attention_scope(attention), adapter_scope(adapted), _recording(layers, rows.to(device), hidden):
        logits: Tensor = model.module(
            input_ids=packed.token_ids[None].to(device),
            position_ids=packed.positions[None].to(device),
            use_cache=False,
            **arguments,
        ).logits[0]
    return Outputs(logits if model.keeps_rows else logits[rows.to(device)], hidden)


def decoder_layers(model: LoadedModel) -> Sequence[torch.nn.Module]:
    """The model's list of decoder layers: the module list with as many parts as there are attention layers."""
    for part in model.module.modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) == len(model.layers):
            return list(part)
    return ()


@contextmanager
def _recording(layers: Sequence[torch.nn.Module], rows: Tensor, hidden: list[Tensor]) -> Iterator[None]:
    def record(_module: torch.nn.Module, _inputs: object, output: Any) -> None:
        states = output[0] if isinstance(output, tuple) else output
        hidden.append(states.reshape(-1, states.shape[-1])[rows])

    hooks = [layer.register_forward_hook(record) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
