"""Torch backend: one attention call over one run of keys, on any device.

Two implementations. `attend_plain` writes out scores and softmax: it is the definition of correct, supports soft
caps and any head sizes, and bounds its memory by processing the queries in slices. `attend` uses torch's
flash kernel for the CPU where possible. Both read grouped keys without copying them: the queries of the heads
that share a key head are packed side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvmosaic.attention.interface import PoolName
from kvmosaic.attention.reads import ReadPlan
from kvmosaic.rope import RotationTables

_MAX_SCORES = 1 << 25
"""Max scores held at once by `attend_plain`."""


@runtime_checkable
class AttentionBackend(Protocol):
    """Attention over one run of keys, with the log-sum-exp needed to merge it with others."""

    def attend(
        self,
        query: Float[Tensor, "R H D"],
        key: Float[Tensor, "S G D"],
        value: Float[Tensor, "S G Dv"],
        *,
        scaling: float,
        causal: bool = False,
        mask: Bool[Tensor, "R S"] | None = None,
        softcap: float | None = None,
        bias: Float[Tensor, "H S"] | None = None,
    ) -> tuple[Float[Tensor, "R H Dv"], Float[Tensor, "R H"]]:
        """Attends R queries to S keys.

        Args:
            query: [R, H, D], rotated relative to the keys.
            key: [S, G, D], any strides.
            value: [S, G, Dv], any strides.
            scaling: factor on the scores.
            causal: query i sees the first i + 1 keys (R == S).
            mask: [R, S] bool, True where a key is seen.
            softcap: scores become softcap * tanh(score / softcap).
            bias: [H, S], added to the scores of every query, in float32 (float64 for float64).

        Returns:
            outputs [R, H, Dv] in the dtype of the query, and log-sum-exp [R, H] in float32 (float64 for float64);
            a query that sees nothing gives -inf.
        """


class TorchBackend:
    """Attention with torch operations only."""

    def attend(
        self,
        query: Float[Tensor, "R H D"],
        key: Float[Tensor, "S G D"],
        value: Float[Tensor, "S G Dv"],
        *,
        scaling: float,
        causal: bool = False,
        mask: Bool[Tensor, "R S"] | None = None,
        softcap: float | None = None,
        bias: Float[Tensor, "H S"] | None = None,
    ) -> tuple[Float[Tensor, "R H Dv"], Float[Tensor, "R H"]]:
        """See `AttentionBackend.attend`."""
        is_prefix = value.shape[-1] < key.shape[-1] and value.data_ptr() == key.data_ptr()
        fits_flash = query.device.type == "cpu" and (value.shape[-1] == key.shape[-1] or is_prefix)
        if not fits_flash or softcap is not None:
            return attend_plain(
                query, key, value, scaling=scaling, causal=causal, mask=mask, softcap=softcap, bias=bias
            )
        # values that are a prefix of the keys (latent attention): attend to the whole key, keep the prefix
        output, lse = _attend_flash(query, key, key if is_prefix else value, scaling, causal, mask, bias)
        return output[..., : value.shape[-1]], lse


def _attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    causal: bool,
    mask: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    split = query.reshape(num_rows, num_kv_heads, group, head_dim)
    if not causal and mask is None and bias is None:
        packed = split.transpose(0, 1)
        packed = packed.reshape(1, num_kv_heads, num_rows * group, head_dim)
        output, lse = flash(packed, key.transpose(0, 1)[None], value.transpose(0, 1)[None], 0.0, False, scale=scaling)
        output = output.reshape(num_kv_heads, num_rows, group, -1).transpose(0, 1).reshape(num_rows, num_heads, -1)
        return output, lse.reshape(num_kv_heads, num_rows, group).transpose(0, 1).reshape(num_rows, num_heads)
    # [G, H/G, R, D] against [G, 1 -> H/G, S, D]: every kv head is a batch row, its keys are expanded, not copied
    heads = split.permute(1, 2, 0, 3)
    keys = key.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    values = value.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    added = None if bias is None else bias.reshape(num_kv_heads, group, 1, -1)
    if mask is not None:
        dtype = query.dtype if bias is None else bias.dtype
        shown = torch.zeros(mask.shape, dtype=dtype, device=query.device).masked_fill_(~mask, -torch.inf)[None, None]
        added = shown if added is None else shown + added
    output, lse = flash(heads, keys, values, 0.0, causal and mask is None, attn_mask=added, scale=scaling)
    output = output.permute(2, 0, 1, 3).reshape(num_rows, num_heads, -1)
    lse = lse.permute(2, 0, 1).reshape(num_rows, num_heads)
    if mask is not None:
        lse = lse.masked_fill(~mask.any(1)[:, None], -torch.inf)
    return output, lse


def attend_plain(
    query: Float[Tensor, "R H D"],
    key: Float[Tensor, "S G D"],
    value: Float[Tensor, "S G Dv"],
    *,
    scaling: float,
    causal: bool = False,
    mask: Bool[Tensor, "R S"] | None = None,
    softcap: float | None = None,
    bias: Float[Tensor, "H S"] | None = None,
) -> tuple[Float[Tensor, "R H Dv"], Float[Tensor, "R H"]]:
    """Attention written out; arguments and results as `AttentionBackend.attend`."""
    num_rows, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    if causal and mask is None:
        mask = torch.ones(num_rows, num_keys, dtype=torch.bool, device=query.device).tril_()
    precision = torch.promote_types(query.dtype, torch.float32)
    keys, values = key.to(precision), value.to(precision)
    outputs, sums = [], []
    step = max(1, _MAX_SCORES // (num_heads * num_keys))
    for first in range(0, num_rows, step):
        part = query[first : first + step].to(precision).reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("rgjd,sgd->rgjs", part, keys) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + bias.view(num_kv_heads, -1, num_keys).to(precision)
        if mask is not None:
            scores = scores.masked_fill(~mask[first : first + step, None, None, :], -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
        outputs.append(torch.einsum("rgjs,sgd->rgjd", weights, values).flatten(1, 2))
        sums.append(lse.flatten(1, 2))
    return torch.cat(outputs).to(query.dtype), torch.cat(sums)


Pools = Mapping[PoolName | None, tuple[Float[Tensor, "_ G D"], Float[Tensor, "_ G Dv"]]]
"""Keys [slots, G, D] and values [slots, G, Dv] of every pool; None: those of the step's own rows."""


@runtime_checkable
class PlanReader(Protocol):
    """Reads one plan, layer after layer."""

    def attend(
        self,
        query: Float[Tensor, "T H D"],
        pools: Pools,
        *,
        scaling: float,
        softcap: float | None = None,
        tables: RotationTables | None = None,
    ) -> tuple[Float[Tensor, "T H Dv"], Float[Tensor, "T H"]] | None:
        """All calls of the plan, with rotated queries, merged.

        Args:
            query: [T, H, D], rotated at its own positions.
            pools: the pools that the calls name.
            scaling: factor on the scores.
            softcap: scores become softcap * tanh(score / softcap).
            tables: rotate the R stacked queries; None: nothing is moved.

        Returns:
            outputs [T, H, Dv] and log-sum-exp [T, H]; None if the backend does not support this layer.
        """


@runtime_checkable
class LayerBackend(Protocol):
    """Optional capability of an `AttentionBackend`."""

    def plan_reader(self, plan: ReadPlan) -> PlanReader:
        """Creates a reader for the layers that share this plan, for one step."""
