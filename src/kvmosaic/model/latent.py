"""Latent attention (MLA): caches the compressed key-value latent, not the heads it expands to, where results agree.

A layer's keys and values are linear in one latent c of r numbers shared by all heads, plus one rotary part k_r:

    k_h = [W_uk[h] c, k_r]      v_h = W_uv[h] c

so q_h . k_h = [W_uk[h]^T q_nope, q_rope] . [c, k_r]: plain attention with ONE key head [c, k_r] whose first r numbers
are also the value. The per-head value projection is applied once, to the attended latent. Nothing else is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.layers import AttentionCall, LayerSpec
from kvmosaic.layers.spec import LATENT_ATTRIBUTE
from kvmosaic.model.hook import current_receiver


class LatentProjection:
    """The two per-head projections of one latent attention module.

    While a receiver is in scope the module's expansion is skipped: attention is called with the latent key and value.
    Outside a scope the module runs its original code.
    """

    def __init__(self, module: nn.Module) -> None:
        self._projection: Any = module.kv_b_proj
        self._nope_dim: int = module.qk_nope_head_dim  # type: ignore[assignment]
        self._value_dim: int = module.v_head_dim  # type: ignore[assignment]
        self.rank: int = module.kv_lora_rank  # type: ignore[assignment]
        self.rope_dim: int = module.qk_rope_head_dim  # type: ignore[assignment]
        self._expand_kv: Any = module.expand_kv

    def _weight(self) -> Tensor:
        """[H, nope + value, r]: a view, so that moved or changed weights stay in sync."""
        weight: Tensor = self._projection.weight
        return weight.view(-1, self._nope_dim + self._value_dim, self.rank)

    def absorb(self, query: Tensor) -> Tensor:
        """[1, H, T, nope + rope] -> [1, H, T, r + rope]."""
        content = torch.matmul(query[..., : self._nope_dim], self._weight()[:, : self._nope_dim])
        return torch.cat((content, query[..., self._nope_dim :]), dim=-1)

    def expand(self, attended: Tensor) -> Tensor:
        """[T, H, r] -> [T, H, value]."""
        weight = self._weight()[:, self._nope_dim :].to(attended.dtype)
        return torch.matmul(attended.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

    def expand_kv(self, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Replaces the module's expansion of [1, 1, T, r] and [1, 1, T, rope] to keys and values."""
        if current_receiver() is None:
            expanded: tuple[Tensor, Tensor] = self._expand_kv(latent, rotary)
            return expanded
        key = torch.cat((latent, rotary), dim=-1)
        return key, key[..., : self.rank]

    def expand_by_own_code(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads by the module's own code, from latent keys [1, 1, T, r + rope]."""
        expanded: tuple[Tensor, Tensor] = self._expand_kv(key[..., : self.rank], key[..., self.rank :])
        return expanded


def can_keep_latent(module: nn.Module) -> bool:
    """Whether this attention module expands latents as described above."""
    projection = getattr(module, "kv_b_proj", None)
    sizes = [getattr(module, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    rank = getattr(module, "kv_lora_rank", None)
    return (
        callable(getattr(module, "expand_kv", None))
        and isinstance(projection, nn.Linear)
        and projection.bias is None
        and projection.weight.is_floating_point()
        and isinstance(rank, int)
        and projection.in_features == rank
        and all(isinstance(size, int) for size in sizes)
    )


def keep_latent(module: nn.Module) -> LatentProjection:
    """Makes the module pass latents to the receiver; `expand_again` reverts it."""
    expand_again(module)
    projection = LatentProjection(module)
    module.__dict__[LATENT_ATTRIBUTE] = projection
    module.__dict__["expand_kv"] = projection.expand_kv
    return projection


def expand_again(module: nn.Module) -> None:
    """Reverts `keep_latent`."""
    if module.__dict__.pop(LATENT_ATTRIBUTE, None) is not None:
        del module.__dict__["expand_kv"]


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
