"""Layer check: compares attention of each layer with its own code, and fused operations with what they replace.

One forward of the model's own code over ordinary text. In every layer its own attention function (with its own mask,
windows, soft caps and sinks) gets the same queries, keys and values as dense attention configured by `LayerSpec`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvmosaic.attention.dense import DenseAttention
from kvmosaic.engine.self_check.comparison import Comparison, worst_finding
from kvmosaic.layers import AttentionCall
from kvmosaic.layout import arrange, dense
from kvmosaic.model.adapters import installed_adapters
from kvmosaic.model.cpu.fused import Fused
from kvmosaic.model.hook import attention_scope
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.probe.adapter_layers import check_against_own_code
from kvmosaic.model.probe.own_code import FusedCall, run_own_code
from kvmosaic.prompt import Prompt

_ATTENTION_LIMIT = 1e-3
"""Both sides compute in float32 or wider; a wrong mask, scale or soft cap changes outputs by tenths."""
_LATENT_LIMITS = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""For queries absorbed into the latent, which are rounded once more."""
_MAX_OPENED_TOKENS = 128
"""Adapted modules are compared in the model's own dtype, where rounding of a bias grows with the distance."""
_FUSED_LIMIT = 5e-2
"""Relative to what a module adds to its input, averaged: another order of rounding to bfloat16 makes a hundredth."""
_ROUNDING = 2.0**-6
"""Two units in the last place of bfloat16 either way: such differences of single numbers do not count."""


def check_layers(model: LoadedModel, tokens: Sequence[int]) -> list[Comparison]:
    """Findings on attention, and on fused operations if any; none for adapted modules, which raise instead.

    Raises:
        UnsupportedModel: an adapted attention module differs from its own code.
        ModelError: the model's own attention function is not found.
    """
    if opened := installed_adapters(model.module):  # these compare themselves: they have no attention function
        with torch.inference_mode():
            check_against_own_code(model.module, opened, list(model.layers), None, min(len(tokens), _MAX_OPENED_TOKENS))
        return []
    found: list[Comparison] = []
    facts = DenseAttention(dense(arrange(Prompt.plain(tokens))), model.layers)

    def compare(call: AttentionCall, theirs: Tensor) -> None:
        ours, limit = facts.attend(call, call.query, call.key, call.value), _ATTENTION_LIMIT
        if call.latent is not None:
            ours, limit = call.latent.expand(ours), _LATENT_LIMITS.get(call.query.dtype, limit)
        difference = _difference(ours, theirs)
        found.append(Comparison("attention", "the model's own code", difference, limit, f"layer {call.layer_index}"))

    calls = run_own_code(model, tokens, compare)
    findings = [worst_finding(found)]
    if calls:
        fused = [
            Comparison("fused form", "its own code", _fused_difference(call, facts), _FUSED_LIMIT, _name(call.form))
            for call in calls
        ]
        findings.append(worst_finding(fused))
    return findings


def _fused_difference(call: FusedCall, attention: DenseAttention) -> float:
    """Mean difference of a fused form from its module's own code, in means of what the module adds to its input."""
    with torch.inference_mode(), attention_scope(attention):
        result = call.form.forward(*call.arguments, **call.named)
    ours, theirs = (result[0] if isinstance(result, tuple) else result).double(), call.output.double()
    added = theirs - call.arguments[0].double() if call.form.kind == "layers" else theirs
    apart = ((ours - theirs).abs() - _ROUNDING * theirs.abs()).clamp_min(0).mean(dim=-1)
    rows = apart / added.abs().mean(dim=-1).clamp_min(1e-30)
    return float(rows.max().nan_to_num(math.inf))


def _name(form: Fused) -> str:
    index = getattr(getattr(form.module, "self_attn", form.module), "layer_idx", None)
    return type(form.module).__name__ if index is None else f"layer {index}"


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference of a row, in root mean squares of the output."""
    apart = (ours.double() - theirs.double()).square().mean(dim=(1, 2)).sqrt().max()
    return float((apart / theirs.double().square().mean().sqrt().clamp_min(1e-30)).nan_to_num(math.inf))
