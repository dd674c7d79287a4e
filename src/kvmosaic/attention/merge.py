"""Merge: combines partial attention results exactly, by their log-sum-exp.

    L = logsumexp_i(l_i);   o = sum_i exp(l_i - L) o_i

The identity of flash attention and ring attention (Milakov and Gimelshein 2018, Dao et al. 2022).
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def merge_partials(
    outputs: Float[Tensor, "R H Dv"], lse: Float[Tensor, "R H"], rows: Int[Tensor, " R"], num_rows: int
) -> tuple[Float[Tensor, "T H Dv"], Float[Tensor, "T H"]]:
    """Merges partial results that belong to the same row.

    Args:
        outputs: [R, H, Dv] partial outputs.
        lse: [R, H] log-sum-exp of their scores; -inf where a partial saw nothing.
        rows: [R] the row each partial belongs to.
        num_rows: T, the number of rows.

    Returns:
        outputs [T, H, Dv] and their log-sum-exp [T, H].
    """
    index = rows[:, None].expand_as(lse)
    highest = lse.new_full((num_rows, lse.shape[1]), -torch.inf).scatter_reduce_(0, index, lse, "amax")
    highest = highest.nan_to_num_(neginf=0.0)
    weights = torch.exp(lse - highest[rows])
    total = torch.zeros_like(highest).index_add_(0, rows, weights)
    merged = torch.zeros(num_rows, *outputs.shape[1:], dtype=weights.dtype, device=outputs.device)
    merged.index_add_(0, rows, outputs.to(weights.dtype) * weights[..., None])
    merged /= total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return merged.to(outputs.dtype), highest + torch.log(total)


def apply_sinks(
    outputs: Float[Tensor, "T H Dv"], lse: Float[Tensor, "T H"], sinks: Float[Tensor, " H"]
) -> Float[Tensor, "T H Dv"]:
    """Adds a learned score per head to the softmax, with a zero value (attention sinks, GPT-OSS).

    Args:
        outputs: [T, H, Dv].
        lse: [T, H].
        sinks: [H].
    """
    return (outputs * torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]).to(outputs.dtype)
