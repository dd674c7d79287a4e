"""The model as transformers wrote it: eager attention with a written-out float mask."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as build_falcon_alibi

from kvmosaic.layers import MaskSpec
from kvmosaic.layout import DenseLayout
from support.float64 import Float64

_ATTENTION_CLASSES = (
    "BloomAttention",
    "CodeGenAttention",
    "FalconAttention",
    "GPTJAttention",
    "GPTNeoSelfAttention",
    "MptAttention",
    "XGLMAttention",
)


def eager_logits(model: Any, layout: DenseLayout, masks: Sequence[MaskSpec]) -> Tensor:
    """Logits [T, V] of one unmodified eager forward with the positions and mask of a layout that moves nothing.

    Args:
        model: a transformers model; its attention implementation is put back afterwards.
        layout: a dense layout whose distances are all 0.
        masks: the layers' masks, read off the model; hybrid models take one mask per layer type.
    """
    assert layout.is_one_forward
    if not model._can_set_attn_implementation():
        return own_logits(model, layout, masks)
    positions = torch.from_numpy(layout.question_positions)
    seen = torch.from_numpy(layout.mask)
    dtype = model.get_input_embeddings().weight.dtype
    floats = [_float_mask(seen & _shown(mask, positions), dtype) for mask in masks]
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    mask: Any = floats[0]
    if kinds and "dict)" in inspect.getsource(type(getattr(model, "model", model.base_model)).forward):
        mask = dict(zip(kinds, floats, strict=True))
    else:
        assert len(set(masks)) == 1, "a model with several masks takes them by layer type"
    before = config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            output = model(
                input_ids=torch.from_numpy(layout.token_ids)[None],
                position_ids=positions[None],
                attention_mask=mask,
                use_cache=False,
            )
    finally:
        model.set_attn_implementation(before)
    logits: Tensor = output.logits[0]
    return logits


def own_logits(model: Any, layout: DenseLayout, masks: Sequence[MaskSpec]) -> Tensor:
    """`eager_logits` of a model whose attention is written into it: what its modules are given is replaced.

    Every attention module gets the layout's mask instead of the causal one that the model made by counting rows, and a
    bias at the layout's positions instead of one at rows 0, 1, 2, …
    """
    positions = torch.from_numpy(layout.question_positions)
    seen = torch.from_numpy(layout.mask)
    dtype = model.get_input_embeddings().weight.dtype
    handles = []
    with Float64() if dtype is torch.float64 else nullcontext():
        bias = _own_bias(model, positions, dtype)
    parts = [part for part in model.modules() if type(part).__name__ in _ATTENTION_CLASSES]
    for part, spec in zip(parts, masks, strict=True):
        shown = seen & _shown(spec, positions)
        mask: Tensor = _float_mask(shown, dtype)
        replaced: dict[str, Any] = {}
        if type(part).__name__ == "BloomAttention":
            replaced["alibi"] = bias
        elif type(part).__name__ == "MptAttention":
            replaced["position_bias"], mask = bias, ~shown[None, None]
        elif type(part).__name__ == "FalconAttention" and bias is not None:
            mask = (bias[None] / math.sqrt(part.head_dim)).masked_fill(~shown, torch.finfo(dtype).min)
        replaced["attention_mask"] = mask
        if hasattr(part, "bias"):
            part.bias = torch.ones_like(part.bias)  # GPT-Neo's windows, by row

        def put(_: Any, arguments: Any, named: Any, replaced: dict[str, Any] = replaced) -> Any:
            return arguments, {**named, **replaced}

        handles.append(part.register_forward_pre_hook(put, with_kwargs=True))
    try:
        with torch.inference_mode():
            logits: Tensor = model(
                input_ids=torch.from_numpy(layout.token_ids)[None], position_ids=positions[None], use_cache=False
            ).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    return logits


def _own_bias(model: Any, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """[H, 1, T]: what the model itself adds for keys at these positions."""
    count = int(positions.max()) + 1
    ones = torch.ones(1, count, dtype=torch.long)
    if type(model).__name__ == "BloomForCausalLM":
        bias = model.transformer.build_alibi_tensor(ones, model.config.n_head, dtype)
    elif type(model).__name__ == "MptForCausalLM":
        bias = model.transformer.build_mpt_alibi_tensor(model.config.n_heads, model.config.max_seq_len)
    elif getattr(model.config, "alibi", False):
        bias = build_falcon_alibi(ones, model.config.num_attention_heads, dtype)
    else:
        return None
    result: Tensor = bias[:, :, positions]
    return result


def _shown(mask: MaskSpec, positions: Tensor) -> Tensor:
    """[T, T]: what a layer's own mask shows, by position (the layout's mask adds causality)."""
    query, key = positions[:, None], positions[None, :]
    if mask.kind == "window":
        return query < key + mask.size
    if mask.kind == "chunked":
        return query // mask.size == key // mask.size
    return torch.ones(len(positions), len(positions), dtype=torch.bool)


def _float_mask(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, 1, T, T], 0 where a key is seen."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)[None, None]
