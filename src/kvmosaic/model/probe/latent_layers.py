"""Latent layers: switches a model's layers to latents together, if scores and values stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvmosaic.layers import AttentionCall, LayerSpec
from kvmosaic.model.latent import LatentProjection, can_keep_latent, expand_again, keep_latent

_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
_FINE_TOLERANCE = 1e-4


def with_latents(
    layers: list[LayerSpec], expanded: list[AttentionCall], record: Callable[[], list[AttentionCall]]
) -> tuple[LayerSpec, ...]:
    """Switches a model's latent attention layers to latents, all of them or none.

    Args:
        layers: the layers as transformers runs them.
        expanded: their calls in one forward.
        record: runs the same forward again.

    Returns:
        The layers as receivers see them from now on.
    """
    projections = {
        call.layer_index: keep_latent(call.module)
        for call, layer in zip(expanded, layers, strict=True)
        if can_keep_latent(call.module) and _turns_its_end(call, layer)
    }
    if not projections:
        return tuple(layers)
    latents = record()
    if not all(_is_same(expanded[index], latents[index], each) for index, each in projections.items()):
        for index in projections:
            expand_again(expanded[index].module)
        return tuple(layers)
    return tuple(
        _latent_layer(layer, projections[layer.index]) if layer.index in projections else layer for layer in layers
    )


def _turns_its_end(call: AttentionCall, layer: LayerSpec) -> bool:
    """Whether a layer has one key head per query head, and rotates exactly the part beside the latent."""
    rotation = layer.rotation
    is_plain = layer.is_stored and layer.num_query_heads == layer.num_kv_heads
    return is_plain and (rotation is None or rotation.offset == call.module.qk_nope_head_dim)


def _latent_layer(layer: LayerSpec, projection: LatentProjection) -> LayerSpec:
    width = projection.rank + projection.rope_dim
    return replace(
        layer,
        num_kv_heads=1,
        key_dim=width,
        value_dim=projection.rank,
        rotation=layer.rotation.at(projection.rank, width) if layer.rotation else None,
        value_in_key=True,
    )


def _is_same(call: AttentionCall, latent: AttentionCall, projection: LatentProjection) -> bool:
    """Whether latent attention gives the scores and values of the expanded heads."""
    tolerance = _TOLERANCE.get(call.query.dtype, _FINE_TOLERANCE)
    heads = call.query.shape[1]
    value = projection.expand(latent.value.expand(-1, heads, -1))
    pairs = ((_scores(call), _scores(latent)), (call.value.double(), value.double()))
    return all(float((mine - other).abs().max()) <= tolerance * float(mine.abs().max()) for mine, other in pairs)


def _scores(call: AttentionCall) -> Tensor:
    """[H, T, T]."""
    key = call.key.double().expand(-1, call.query.shape[1], -1)
    return torch.einsum("qhd,khd->hqk", call.query.double(), key)
