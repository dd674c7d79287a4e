"""A stand-in for vLLM's attention kernels over a cache in float8, which it has for CPUs with AVX-512 only.

vLLM chooses, allocates and schedules such a cache as it does there; these functions write and read it in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

FORMATS = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def install() -> None:
    """Takes the place of the kernels in this process."""
    from vllm import _custom_ops as operations
    from vllm.v1.attention.backends import cpu_attn

    metadata = operations.cpu_attn_get_scheduler_metadata

    def plan(**arguments: Any) -> Tensor:
        return metadata(**{**arguments, "kv_cache_dtype": "auto"})

    operations.cpu_attn_get_scheduler_metadata = plan
    operations.cpu_attn_reshape_and_cache = write
    operations.cpu_attention_with_kv_cache = attend
    cpu_attn._get_attn_isa = lambda *_, **__: "vec"


def _by_number(cache: Tensor) -> Tensor:
    """Keys of a block of one head lie number by number: [N, G, P, D] as [N, G, D, P]."""
    blocks, heads, tokens, numbers = cache.shape
    return cache.view(blocks, heads, -1).view(blocks, heads, numbers, tokens)


def write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """As vLLM's `cpu_attn_reshape_and_cache`."""
    size, kept = key_cache.shape[2], FORMATS[kv_cache_dtype]
    most = torch.finfo(kept).max
    is_used = slots >= 0
    blocks, offsets = slots[is_used] // size, slots[is_used] % size
    keys, values = (
        (numbers[: len(slots)][is_used].float() / scale).clamp(-most, most).to(kept).view(torch.uint8)
        for numbers, scale in ((key, k_scale), (value, v_scale))
    )
    _by_number(key_cache)[blocks, :, :, offsets] = keys
    value_cache[blocks, :, offsets] = values


def attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: Tensor | None,
    sliding_window: int,
    block_table: Tensor,
    softcap: float,
    scheduler_metadata: Tensor,
    s_aux: Tensor | None,
    dynamic_causal: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    """As vLLM's `cpu_attention_with_kv_cache`, for causal attention."""
    assert causal and alibi_slopes is None and sliding_window < 0 and s_aux is None and not softcap
    size, kept = key_cache.shape[2], FORMATS[kv_cache_dtype]
    group = query.shape[1] // key_cache.shape[1]
    for number, end in enumerate(seq_lens.tolist()):
        first, last = query_start_loc[number : number + 2].tolist()
        if first == last:
            continue
        tokens = torch.arange(end)
        blocks, offsets = block_table[number][tokens // size].long(), tokens % size
        keys = _by_number(key_cache)[blocks, :, :, offsets].view(kept).float() * k_scale
        values = value_cache[blocks, :, offsets].view(kept).float() * v_scale
        keys, values = (each.repeat_interleave(group, 1).transpose(0, 1) for each in (keys, values))
        scores = query[first:last].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        at = torch.arange(end - (last - first), end)
        scores = scores.masked_fill(tokens > at[:, None], -torch.inf)
        output[first:last].copy_((scores.softmax(-1) @ values).transpose(0, 1).reshape(output[first:last].shape))
