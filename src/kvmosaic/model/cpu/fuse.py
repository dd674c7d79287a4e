"""Fusion of a loaded model's small operations: one recorded forward, then every module that has a fused form."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn

from kvmosaic.errors import NativeUnavailable
from kvmosaic.model.cpu.fuse_search import (
    Arguments,
    attention_form,
    is_untouched,
    layer_form,
    mlp_form,
    norm_form,
    own_value,
)
from kvmosaic.model.cpu.fused import fused_form
from kvmosaic.model.cpu.prepack import PackedLinear
from kvmosaic.model.cpu.row_kernels import RowKernels
from kvmosaic.model.hook import attention_scope

_POSITIONS = (0, 1, 2, 3, 7, 40, 111, 509, 1021, 4093, 30011, 131071)
"""Near and far positions, to detect modules that treat only far tokens differently."""
_HIGHEST_POSITION = 2**24


def fuse_operations(model: Any, max_positions: int | None) -> Counter[str]:
    """Fuses supported modules of a transformers model in bfloat16 on a CPU, and counts them by kind.

    Args:
        model: a `...ForCausalLM` whose attention function is ours.
        max_positions: its max position, if it has a limit.
    """
    try:
        kernels = RowKernels()
    except NativeUnavailable:
        return Counter()
    found: Counter[str] = Counter()
    with torch.inference_mode():
        calls = _record_calls(model, max_positions)
        for find in (norm_form, mlp_form, attention_form, layer_form):
            for module, arguments in calls:
                form = find(module, arguments, kernels) if is_untouched(module) else None
                if form is not None:
                    form.install()
                    found[form.kind] += 1
    return found


def count_fused(model: nn.Module) -> Counter[str]:
    """Number of fused modules by kind."""
    forms = (fused_form(part) for part in model.modules())
    return Counter(form.kind for form in forms if form is not None)


def _record_calls(model: Any, max_positions: int | None) -> list[tuple[nn.Module, Arguments]]:
    """Arguments of each module in the order of the calls, for modules called once per forward."""
    calls: dict[int, list[tuple[nn.Module, Arguments]]] = {}

    def keep(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        calls.setdefault(id(module), []).append((module, (arguments, named)))

    positions = [place for place in _POSITIONS if max_positions is None or place < max_positions]
    if max_positions is not None and max_positions <= _HIGHEST_POSITION and max_positions - 1 not in positions:
        positions.append(max_positions - 1)
    vocab_size = int(model.get_input_embeddings().weight.shape[0])
    tokens = [(vocab_size // 3 + 7 * number) % vocab_size for number in range(len(positions))]
    with ExitStack() as hooks, suppress(Exception):  # a model may reject far positions: no more is fused then
        for module in model.modules():
            if is_untouched(module) and not isinstance(module, nn.Linear | PackedLinear | nn.ModuleList):
                hooks.callback(module.register_forward_pre_hook(keep, with_kwargs=True).remove)
        with attention_scope(own_value):
            model(input_ids=torch.tensor([tokens]), position_ids=torch.tensor([positions]), use_cache=False)
    return [recorded[0] for recorded in calls.values() if len(recorded) == 1]
