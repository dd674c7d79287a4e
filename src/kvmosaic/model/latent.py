"""Latent attention (MLA): caches the compressed key-value latent instead of the heads it expands to.

A layer's keys and values are linear in one latent c of r numbers shared by all heads, plus one rotary part k_r:

    k_h = [W_uk[h] c, k_r]      v_h = W_uv[h] c

so q_h . k_h = [W_uk[h]^T q_nope, q_rope] . [c, k_r]: plain attention with ONE key head [c, k_r] whose first r numbers
are also the value. The per-head value projection is applied once, to the attended latent. Nothing else is stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvmosaic.layers.spec import LATENT_ATTRIBUTE
from kvmosaic.model.hook import is_in_scope


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
        if not is_in_scope():
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
