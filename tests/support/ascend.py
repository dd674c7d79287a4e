"""What vLLM-Ascend 0.23.0.post1 does to a cache, written down from its source; nothing here ran on an NPU.

    cache of a layer    worker/model_runner_v1.py: each part is bytes of its own, viewed as the type, then as the shape
    attention           attention/attention_v1.py: do_kv_cache_update, which keeps the first cache that it is given
    latent attention    attention/mla_v1.py: exec_kv_prefill
    with an indexer     attention/sfa_v1.py: exec_kv, indexer_select_pre_process; since 0.30 in attention/indexer.py
    device/device_op.py: reshape_and_cache

The kernels of torch_npu are stand-ins that do what its reference says.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class StandInTorchNpu:
    """The kernels of torch_npu that write caches."""

    @staticmethod
    def _npu_reshape_and_cache(
        *, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
    ) -> None:
        assert slot_indices.dtype == torch.int32, "the kernel reads 32 bits per slot"
        assert key.is_contiguous() and value.is_contiguous()
        key_cache.view(-1, *key_cache.shape[2:])[slot_indices.long()] = key
        value_cache.view(-1, *value_cache.shape[2:])[slot_indices.long()] = value

    @classmethod
    def npu_scatter_pa_kv_cache(
        cls,
        *,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        cache_mode: str,
    ) -> None:
        """What vLLM-Ascend calls instead since 0.30."""
        assert cache_mode == "Norm"
        cls._npu_reshape_and_cache(
            key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_indices=slot_mapping
        )

    @staticmethod
    def npu_kv_rmsnorm_rope_cache(
        kv: Tensor,
        weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        slots: Tensor,
        rotation: Tensor,
        latent: Tensor,
        **more: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows [B, 1, 1, C + R] normed, turned after neighbours were sorted apart, and stored."""
        assert slots.dtype == torch.int64 and more["cache_mode"] == "PA"
        size = latent.shape[-1]
        rows, part = kv[..., :size].double(), kv[..., size:].double()
        normed = rows / (rows.square().mean(-1, keepdim=True) + more["epsilon"]).sqrt() * weight
        halves = torch.cat((part[..., 0::2], part[..., 1::2]), dim=-1)
        one, other = halves.chunk(2, dim=-1)
        turned = halves * cos + torch.cat((-other, one), dim=-1) * sin
        latent.view(-1, size)[slots] = normed[:, 0, 0].to(latent)
        rotation.view(-1, rotation.shape[-1])[slots] = turned[:, 0, 0].to(rotation)
        return turned, normed, turned, normed

    @staticmethod
    def npu_rotary_mul(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, other = keys.chunk(2, dim=-1)
        return keys * cos + torch.cat((-other, one), dim=-1) * sin

    @staticmethod
    def npu_dynamic_quant(rows: Tensor, dst_type: torch.dtype) -> tuple[Tensor, Tensor]:
        most = 127 if dst_type is torch.int8 else 448
        scales = rows.float().abs().amax(-1) / most
        codes = rows.float() / scales[..., None]
        return (codes.round() if dst_type is torch.int8 else codes).to(dst_type), scales


torch_npu = StandInTorchNpu()


def turned_keys(keys: Tensor, cos: Tensor, sin: Tensor, rope_dim: int, is_neox_style: bool) -> Tensor:
    """rope_forward_triton_siso: the first numbers of [T, 1, D] are turned, in halves or in neighbours."""
    part, rest = keys.split([rope_dim, keys.shape[-1] - rope_dim], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    if is_neox_style:
        return torch.cat((torch_npu.npu_rotary_mul(part, cos, sin), rest), dim=-1)
    sorted_apart = torch.cat((part[..., 0::2], part[..., 1::2]), dim=-1)
    one, other = torch_npu.npu_rotary_mul(sorted_apart, cos, sin).chunk(2, dim=-1)
    return torch.cat((torch.stack((one, other), dim=-1).flatten(-2), rest), dim=-1)


def hadamard(size: int) -> Tensor:
    """[size, size], rounded to bfloat16 as the layer keeps it."""
    rows = torch.ones(1, 1)
    while len(rows) < size:
        rows = torch.cat((torch.cat((rows, rows), 1), torch.cat((rows, -rows), 1)))
    return rows.bfloat16() / size**0.5


class RecordedAttention:
    """AscendAttentionBackendImpl, as far as it writes."""

    alibi_slopes = None

    def __init__(self) -> None:
        self.key_cache: Tensor | None = None
        self.value_cache: Tensor | None = None

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Any, slot_mapping: Tensor) -> None:
        if self.key_cache is None:
            self.key_cache, self.value_cache = kv_cache[0], kv_cache[1]
        assert self.key_cache is not None and self.value_cache is not None
        torch_npu._npu_reshape_and_cache(
            key=key, value=value, key_cache=self.key_cache, value_cache=self.value_cache, slot_indices=slot_mapping
        )


class RecordedLatentAttention:
    """AscendMLAImpl, as far as it writes."""

    alibi_slopes = None
    num_kv_heads = 1
    enable_kv_nz = False
    fa_quant_layer = False

    def __init__(self, latent_size: int, turning_size: int) -> None:
        self.kv_lora_rank, self.qk_rope_head_dim = latent_size, turning_size
        self.kv_a_layernorm = SimpleNamespace(weight=torch.full((latent_size,), 0.5), variance_epsilon=1e-6)

    def exec_kv_prefill(self, kv_no_split: Tensor, cos: Tensor, sin: Tensor, kv_cache: Any, slots: Tensor) -> Any:
        rows = kv_no_split.view(kv_no_split.shape[0], self.num_kv_heads, 1, self.kv_lora_rank + self.qk_rope_head_dim)
        norm = self.kv_a_layernorm
        _, _, turned, latent = torch_npu.npu_kv_rmsnorm_rope_cache(
            *(rows, norm.weight, cos, sin, slots.to(torch.int64), kv_cache[1], kv_cache[0]),
            epsilon=norm.variance_epsilon,
            cache_mode="PA",
        )
        return turned, latent


class Projection(nn.Module):
    """A replicated linear layer of vLLM: it returns a bias, too."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.input_size = input_size
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(output_size, input_size, generator=generator), requires_grad=False)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        return rows @ self.weight.to(rows.dtype).T, None


class RecordedIndexer(nn.Module):
    """AscendSFAIndexerBackend of 0.30, as far as it computes keys; before, its method was the implementation's."""

    def __init__(self, size: int, turning_size: int, is_neox_style: bool, eight_bits: torch.dtype | None) -> None:
        super().__init__()
        self.head_dim, self.qk_rope_head_dim, self.is_rope_neox_style = size, turning_size, is_neox_style
        self.wk_weights_proj = Projection(48, size + 4)
        self.k_norm = nn.Identity()
        self.c8_k_cache_dtype, self.c8_k_scale_cache_dtype = eight_bits, torch.float16
        self.enable_sparse_li_c8 = self.enable_sparse_li_quant = eight_bits is not None
        self.enable_sparse_li_c4 = False
        self.k_hadamard = self.q_hadamard = hadamard(size)

    def forward_k(self, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        projected, _ = self.wk_weights_proj(hidden_states)
        keys = self.k_norm(projected[:, : self.head_dim])[:, None]
        cos, sin = (each.view(-1, self.qk_rope_head_dim) for each in (cos, sin))
        keys = turned_keys(keys, cos, sin, self.qk_rope_head_dim, self.is_rope_neox_style)
        scales = None
        if self.c8_k_cache_dtype is not None:
            codes = keys.flatten(0, 1) @ self.k_hadamard.to(keys.dtype)
            keys, scales = torch_npu.npu_dynamic_quant(codes, dst_type=self.c8_k_cache_dtype)
            scales = scales.to(self.c8_k_scale_cache_dtype)[:, None]
        return keys, scales, projected[:, self.head_dim :]


class RecordedSparseAttention:
    """AscendSFAImpl, as far as it writes."""

    alibi_slopes = None
    num_kv_heads = 1
    has_indexer = True
    enable_sparse_sfa_c8 = enable_dsa_cp = enable_sparse_sfa_turboquant = False

    def __init__(self, latent_size: int, turning_size: int, indexer: RecordedIndexer, *, has_own_cache: bool) -> None:
        self._write = RecordedLatentAttention(latent_size, turning_size)
        self.kv_lora_rank, self.qk_rope_head_dim = latent_size, turning_size
        self.kv_a_layernorm = self._write.kv_a_layernorm
        if has_own_cache:
            self.indexer = SimpleNamespace(impl=indexer)
        else:
            self.indexer = SimpleNamespace()
            self.__dict__.update(indexer.__dict__, **indexer._modules)
            self.indexer_select_pre_process = lambda x, cos, sin: indexer.forward_k(x, cos, sin)[:2]

    def exec_kv(
        self, kv_no_split: Tensor, cos: Tensor, sin: Tensor, kv_cache: Any, slots: Tensor, attn_metadata: Any
    ) -> tuple[None, None]:
        self._write.exec_kv_prefill(kv_no_split, cos, sin, kv_cache, slots)
        return None, None


RecordedSparseAttention.__module__ = "vllm_ascend.attention.sfa_v1"
RecordedAttention.__module__ = "vllm_ascend.attention.attention_v1"
RecordedLatentAttention.__module__ = "vllm_ascend.attention.mla_v1"


class Layer(nn.Module):
    """An attention layer of vLLM, as far as it is asked."""

    def __init__(self, impl: Any, **attributes: Any) -> None:
        super().__init__()
        self.impl = impl
        self.attn_backend = SimpleNamespace(get_name=lambda: "CUSTOM")
        for name, value in attributes.items():
            setattr(self, name, value)


class RecordedRotary(nn.Module):
    """A rotary embedding with its table, [positions, R]: cosines, then sines."""

    def __init__(self, rotary_dim: int, is_neox_style: bool, dtype: torch.dtype, head_size: int) -> None:
        super().__init__()
        self.rotary_dim, self.is_neox_style, self.head_size = rotary_dim, is_neox_style, head_size
        frequencies = 10_000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
        angles = torch.arange(512).double()[:, None] * frequencies
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype))


class Module(nn.Module):
    """The attention module around a layer, which holds the rotary embedding."""

    def __init__(self, layer: Layer, rotary: RecordedRotary) -> None:
        super().__init__()
        self.attn, self.rotary_emb = layer, rotary


def part_of_cache(num_blocks: int, block_size: int, heads: int, size: int, dtype: torch.dtype, padding: int) -> Tensor:
    """One tensor of a cache: bytes that begin at an aligned address inside a larger run of them."""
    count = num_blocks * block_size * heads * size * dtype.itemsize
    raw = torch.zeros(count + 64, dtype=torch.int8)[padding : padding + count]
    return raw.view(dtype).view(num_blocks, block_size, heads, size)


def config_of(layers: dict[str, Layer], block_size: int, dtype: torch.dtype) -> Any:
    """vLLM's configuration, as far as it is asked."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=dtype),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(block_size=block_size),
    )
