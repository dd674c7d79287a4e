"""vLLM's attention layers, backends and rotary embeddings, as far as the worker asks them.

Each backend writes token by token, in the order that the name says, as vLLM's source does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

BLOCKS, SIZE, HEADS, KEY, VALUE, LATENT, TURNING = 6, 8, 2, 16, 16, 24, 8


class Backend:
    """Writes keys and values of token t to slot t, one number after the other."""

    alibi_slopes: Any = None

    def places(self, cache: Any, block: int, offset: int, head: int) -> tuple[Tensor, Tensor]:
        """Views of the key and the value of one token and head."""
        raise NotImplementedError

    def do_kv_cache_update(self, layer: Any, keys: Tensor, values: Tensor, cache: Any, slots: Tensor) -> None:
        for token, slot in enumerate(slots.tolist()):
            for head in range(keys.shape[1]):
                key, value = self.places(cache, slot // SIZE, slot % SIZE, head)
                key.copy_(keys[token, head])
                value.copy_(values[token, head])


class Joined(Backend):
    def places(self, cache: Any, block: int, offset: int, head: int) -> tuple[Tensor, Tensor]:
        row = cache[block, head, offset]
        return row[:KEY], row[KEY:]


class StackedByBlock(Backend):
    def places(self, cache: Any, block: int, offset: int, head: int) -> tuple[Tensor, Tensor]:
        return cache[block, 0, offset, head], cache[block, 1, offset, head]


class StackedFirst(Backend):
    def places(self, cache: Any, block: int, offset: int, head: int) -> tuple[Tensor, Tensor]:
        return cache[0, block, offset, head], cache[1, block, offset, head]


class Separate(Backend):
    def places(self, cache: Any, block: int, offset: int, head: int) -> tuple[Tensor, Tensor]:
        return cache[0][block, offset, head], cache[1][block, offset, head]


class CpuVector(Backend):
    def places(self, cache: Any, block: int, offset: int, head: int) -> tuple[Tensor, Tensor]:
        keys, values = cache[block, head].reshape(-1).view(2, -1)
        return keys.view(KEY, SIZE)[:, offset], values.view(SIZE, VALUE)[offset]


class CpuTiled(Backend):
    """Keys in tiles of two tokens and two numbers, values with pairs of tokens interleaved."""

    def places(self, cache: Any, block: int, offset: int, head: int) -> tuple[Tensor, Tensor]:
        keys, values = cache[block, head].reshape(-1).view(2, -1)
        key = keys.view(SIZE // 2, KEY // 2, 2, 2)[offset // 2, :, offset % 2]
        return key.view(KEY // 2, 2), values.view(SIZE // 2, VALUE, 2)[offset // 2, :, offset % 2]

    def do_kv_cache_update(self, layer: Any, keys: Tensor, values: Tensor, cache: Any, slots: Tensor) -> None:
        super().do_kv_cache_update(layer, keys.unflatten(-1, (KEY // 2, 2)), values, cache, slots)


class Latent(Backend):
    def do_kv_cache_update(self, latent: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor, *_: Any) -> None:
        for token, slot in enumerate(slots.tolist()):
            row = cache.view(-1, SIZE, LATENT + TURNING)[slot // SIZE, slot % SIZE]
            row[:LATENT], row[LATENT:] = latent[token], rotary[token, 0]


class EightBits:
    """Writes bytes, as another backend writes numbers: the nearest float8 number to x / scale."""

    alibi_slopes: Any = None

    def __init__(self, inner: Backend, kept: torch.dtype) -> None:
        self.inner, self.kept = inner, kept

    def do_kv_cache_update(self, layer: Any, keys: Tensor, values: Tensor, cache: Any, slots: Tensor) -> None:
        most = torch.finfo(self.kept).max
        codes = [
            (numbers.float() / scale).clamp(-most, most).to(self.kept).view(torch.uint8)
            for numbers, scale in ((keys, layer._k_scale), (values, layer._v_scale))
        ]
        self.inner.do_kv_cache_update(layer, *codes, cache, slots)


class Layer(nn.Module):
    """An attention layer."""

    def __init__(self, impl: Any, name: str = "FLASH_ATTN", **attributes: Any) -> None:
        super().__init__()
        self.impl = impl
        self.attn_backend = SimpleNamespace(get_name=lambda: name)
        self.kv_cache_dtype = "auto"
        known = {"head_size": KEY, "head_size_v": VALUE, "num_kv_heads": HEADS, "sliding_window": None}
        for key, value in {**known, **attributes}.items():
            setattr(self, key, value)


class Rotary(nn.Module):
    """A rotary embedding with its table, [positions, R]: cosines, then sines."""

    def __init__(
        self,
        rotary_dim: int = KEY,
        *,
        is_neox_style: bool = True,
        dtype: torch.dtype = torch.float32,
        head_size: int = KEY,
        scale: float = 1.0,
        positions: int = 256,
    ) -> None:
        super().__init__()
        self.rotary_dim, self.is_neox_style, self.head_size = rotary_dim, is_neox_style, head_size
        frequencies = 10_000.0 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
        angles = torch.arange(positions).double()[:, None] * frequencies
        self.cos_sin_cache = (torch.cat((angles.cos(), angles.sin()), dim=-1) * scale).to(dtype)

    def apply(self, key: Tensor, position: int, first: int) -> Tensor:
        """What the model makes of one key [D], pair by pair."""
        turned, half = key.clone(), self.rotary_dim // 2
        row = self.cos_sin_cache[position].to(key.dtype)
        for pair in range(half):
            one = first + (pair if self.is_neox_style else 2 * pair)
            other = first + (pair + half if self.is_neox_style else 2 * pair + 1)
            cos, sin = row[pair], row[half + pair]
            turned[one] = key[one] * cos - key[other] * sin
            turned[other] = key[other] * cos + key[one] * sin
        return turned


class AttentionModule(nn.Module):
    """The module around a layer."""

    def __init__(self, layer: nn.Module, rotary: nn.Module | None, **attributes: Any) -> None:
        super().__init__()
        self.attn = layer
        self.rotary_emb = rotary
        for key, value in attributes.items():
            setattr(self, key, value)


class Model(nn.Module):
    """The outermost module."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)


def strided(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of a shape whose dimensions lie in memory in this order, the outermost first."""
    return torch.empty_permuted(shape, order, dtype=dtype).zero_()


EIGHT_BITS = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def cache_of(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Layer, Any]:
    """A layer with a cache of zeros; of bytes, if the kind ends in a format such as "in fp8"."""
    kind, _, name = kind.partition(" in ")
    if name:
        layer, cache = cache_of(kind, torch.uint8)
        layer.impl, layer.kv_cache_dtype, layer.dtype = EightBits(layer.impl, EIGHT_BITS[name]), name, dtype
        layer._k_scale, layer._v_scale = torch.tensor(0.03), torch.tensor(0.5)
        return layer, cache
    head = (BLOCKS, SIZE, HEADS, KEY)
    match kind:
        case "joined by head":
            return Layer(Joined()), torch.zeros(BLOCKS, HEADS, SIZE, KEY + VALUE, dtype=dtype)
        case "joined by token":
            return Layer(Joined()), strided((BLOCKS, HEADS, SIZE, KEY + VALUE), (0, 2, 1, 3), dtype)
        case "joined, heads outermost":
            return Layer(Joined()), strided((BLOCKS, HEADS, SIZE, KEY + VALUE), (1, 0, 2, 3), dtype)
        case "joined, between other layers":
            return Layer(Joined()), torch.zeros(BLOCKS, 3, HEADS, SIZE, KEY + VALUE, dtype=dtype)[:, 1]
        case "stacked by block":
            return Layer(StackedByBlock()), torch.zeros(BLOCKS, 2, SIZE, HEADS, KEY, dtype=dtype)
        case "stacked by block and head":
            return Layer(StackedByBlock()), strided((BLOCKS, 2, SIZE, HEADS, KEY), (0, 1, 3, 2, 4), dtype)
        case "stacked first":
            return Layer(StackedFirst(), "ROCM_AITER_FA"), torch.zeros(2, *head, dtype=dtype)
        case "separate":
            return Layer(Separate()), (torch.zeros(head, dtype=dtype), torch.zeros(head, dtype=dtype))
        case "cpu vector" | "cpu tiled":
            impl = CpuVector() if kind == "cpu vector" else CpuTiled()
            return Layer(impl, "CPU_ATTN"), torch.zeros(BLOCKS, HEADS, SIZE, KEY + VALUE, dtype=dtype)
        case "latent" | "latent with a head":
            known = {"kv_lora_rank": LATENT, "qk_rope_head_dim": TURNING, "head_size": LATENT + TURNING}
            shape = (BLOCKS, SIZE, LATENT + TURNING)
            layer = Layer(Latent(), "TRITON_MLA", **known, num_kv_heads=1)
            cache = torch.zeros(shape, dtype=dtype)
            return layer, cache[:, None] if kind == "latent with a head" else cache
    raise AssertionError(kind)


KINDS = (
    "joined by head",
    "joined by token",
    "joined, heads outermost",
    "joined, between other layers",
    "stacked by block",
    "stacked by block and head",
    "stacked first",
    "separate",
    "cpu vector",
    "cpu tiled",
    "latent",
    "latent with a head",
)


def config_of(layers: dict[str, Layer], block_size: int = SIZE, dtype: torch.dtype = torch.float32) -> Any:
    """vLLM's configuration."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(block_size=block_size),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
