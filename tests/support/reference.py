"""The model as transformers wrote it: eager attention with a written-out float mask."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvmosaic.layout import DenseLayout
from kvmosaic.model import MaskSpec


def eager_logits(model: Any, layout: DenseLayout, masks: Sequence[MaskSpec]) -> Tensor:
    """Logits [T, V] of one unmodified eager forward with the positions and mask of a layout that moves nothing.

    Args:
        model: a transformers model; its attention implementation is put back afterwards.
        layout: a dense layout whose distances are all 0.
        masks: the layers' masks, read off the model; hybrid models take one mask per layer type.
    """
    assert layout.is_one_forward
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
