"""Attention of packed rows, with gradients: one dense mask, and nothing of the engine's caches or kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from kvmosaic.layers import AttentionCall, LayerSpec, MaskSpec


class PackedAttention:
    """A receiver for one forward over packed rows."""

    def __init__(self, layers: Sequence[LayerSpec], mask: Bool[Tensor, "T T"], positions: Int[Tensor, " T"]) -> None:
        self._layers = layers
        self._mask = mask
        self._positions = positions
        self._masks: dict[MaskSpec, Tensor] = {}

    def __call__(self, call: AttentionCall) -> Float[Tensor, "T H Dv"]:
        """Attention of one layer."""
        layer = self._layers[call.layer_index]
        mask = self._visible(layer.mask)
        groups = call.query.shape[1] // call.key.shape[1]
        query, key, value = (part.transpose(0, 1) for part in call.rows)
        key, value = (part.repeat_interleave(groups, dim=0) for part in (key, value))
        if call.softcap is None and call.sinks is None and layer.bias is None:
            # a mask of zeros and -inf in the dtype of the queries takes the fused kernel; a boolean one does not
            bias = torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill(~mask, -torch.inf)
            out = functional.scaled_dot_product_attention(
                query[None], key[None], value[None], attn_mask=bias[None, None], scale=call.scaling
            )
            return out[0].transpose(0, 1)
        scores = query @ key.transpose(1, 2) * call.scaling
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if layer.bias is not None:
            at = self._positions
            scores = scores + layer.bias.between(at, at[None].expand(len(at), -1), scores.dtype).to(scores.device)
        scores = scores.masked_fill(~mask, -torch.inf)
        if call.sinks is not None:
            sinks = call.sinks.to(scores)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
        return (weights @ value).transpose(0, 1)

    def _visible(self, spec: MaskSpec) -> Tensor:
        """[T, T], what rows see in a layer with this mask of its own."""
        if spec not in self._masks:
            query, key = self._positions[:, None], self._positions[None, :]
            shown = self._mask
            if spec.kind == "window":
                shown = shown & (query - key < spec.size)
            elif spec.kind == "chunked":
                shown = shown & (query // spec.size == key // spec.size)
            self._masks[spec] = shown
        return self._masks[spec]
