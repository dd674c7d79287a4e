from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integrations.worker.stand_ins import (
    BLOCKS,
    HEADS,
    KEY,
    KINDS,
    LATENT,
    SIZE,
    TURNING,
    VALUE,
    CpuVector,
    Joined,
    Layer,
    Separate,
    StackedFirst,
    cache_of,
)
from torch import Tensor

from kvmosaic.errors import NotMovable
from kvmosaic.vllm.worker.layouts import KeyValueLayout, find_layout
from kvmosaic.vllm.worker.layouts.cpu import CpuTiledLayout, CpuVectorLayout

SLOTS = st.lists(st.integers(0, BLOCKS * SIZE - 1), unique=True, min_size=1)
DTYPES = [torch.float32, torch.bfloat16]


def random_tokens(num_tokens: int, latent: bool, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    if latent:
        return torch.randn(num_tokens, 1, LATENT + TURNING, generator=generator).to(dtype), None
    keys = torch.randn(num_tokens, HEADS, KEY, generator=generator).to(dtype)
    return keys, torch.randn(num_tokens, HEADS, VALUE, generator=generator).to(dtype)


@cache
def found(kind: str, dtype: torch.dtype) -> tuple[Layer, Any, KeyValueLayout]:
    layer, paged = cache_of(kind, dtype)
    return layer, paged, find_layout("layer", layer, paged)


def same(ours: tuple[Tensor, Tensor | None], theirs: tuple[Tensor, Tensor | None]) -> bool:
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=12)
@given(slots=SLOTS, seed=st.integers(0, 99))
def test_what_the_backend_writes_is_read_and_what_is_written_touches_nothing_else(
    kind: str, dtype: torch.dtype, slots: list[int], seed: int
) -> None:
    layer, cache, layout = found(kind, dtype)
    everything = torch.arange(BLOCKS * SIZE)
    before = random_tokens(len(everything), layout.is_latent, dtype, seed)
    if layout.is_latent:
        rows = before[0]
        layer.impl.do_kv_cache_update(rows[:, 0, :LATENT], rows[..., LATENT:], cache, everything)
    else:
        layer.impl.do_kv_cache_update(layer, *before, cache, everything)
    assert layout.num_slots == len(everything) and layout.block_size == SIZE
    where = torch.tensor(slots)
    assert same(layout.read(where), tuple(None if part is None else part[where] for part in before))  # type: ignore[arg-type]

    written = random_tokens(len(slots), layout.is_latent, dtype, seed + 100)
    layout.write(where, *written)
    assert same(layout.read(where), written)
    rest = torch.tensor([slot for slot in range(BLOCKS * SIZE) if slot not in set(slots)], dtype=torch.int64)
    assert same(layout.read(rest), tuple(None if part is None else part[rest] for part in before))  # type: ignore[arg-type]


def test_what_is_read_is_a_copy() -> None:
    for kind in KINDS:
        layer, cache = cache_of(kind)
        layout = find_layout("layer", layer, cache)
        keys, _ = layout.read(torch.tensor([3, 4]))
        keys += 1
        assert not layout.read(torch.tensor([3, 4]))[0].any(), kind


def test_trying_a_backend_leaves_the_cache_alone() -> None:
    for kind in KINDS:
        layer, cache = cache_of(kind)
        parts = cache if isinstance(cache, tuple) else (cache,)
        for part in parts:
            part.fill_(7)
        find_layout("layer", layer, cache)
        assert all(bool((part == 7).all()) for part in parts), kind


def test_the_common_order_of_cpus_is_read_without_looking_places_up() -> None:
    assert type(find_layout("layer", *cache_of("cpu vector"))) is CpuVectorLayout
    assert type(find_layout("layer", *cache_of("cpu tiled"))) is CpuTiledLayout


class Quantizing(CpuVector):
    """Rounds what it writes."""

    def do_kv_cache_update(self, layer: Any, keys: Tensor, values: Tensor, cache: Any, slots: Tensor) -> None:
        super().do_kv_cache_update(layer, (keys / 8).round() * 8, values, cache, slots)


class Failing(Joined):
    def do_kv_cache_update(self, layer: Any, keys: Tensor, values: Tensor, cache: Any, slots: Tensor) -> None:
        raise RuntimeError("no kernel for this device")


JOINED = torch.zeros(BLOCKS, HEADS, SIZE, KEY + VALUE)
ROWS = torch.zeros(BLOCKS, SIZE, LATENT + TURNING)
LATENT_SIZES = {"kv_lora_rank": LATENT, "qk_rope_head_dim": TURNING}
REFUSED: dict[str, tuple[Layer, Any, str]] = {
    "quantized": (Layer(Joined()), JOINED.to(torch.uint8), "torch.uint8 .auto.; beside plain numbers"),
    "quantized, of a shape of its own": (Layer(Joined()), torch.zeros(6, 2, 8, 68, dtype=torch.int8), "unquantized"),
    "quantized on a CPU": (Layer(CpuVector(), "CPU_ATTN"), JOINED.to(torch.float8_e4m3fn), "beside plain numbers"),
    "a latent quantized": (Layer(Joined(), **LATENT_SIZES), ROWS.to(torch.uint8), "unquantized"),
    "written elsewhere": (Layer(StackedFirst()), torch.zeros(BLOCKS, 2, SIZE, HEADS, KEY), "not found|fails"),
    "rounded on a CPU": (Layer(Quantizing(), "CPU_ATTN"), JOINED, "keys that the CPU kernel wrote are not found"),
    "a CPU kernel that fails": (Layer(Failing(), "CPU_ATTN"), JOINED, "CPU_ATTN fails: no kernel for this device"),
    "a kernel that fails": (Layer(Failing()), JOINED, "fails: no kernel for this device"),
    "other heads": (Layer(Separate(), num_kv_heads=3), (JOINED, JOINED), "expected 3 heads"),
    "another shape": (Layer(Joined()), torch.zeros(BLOCKS, 5, 3, KEY), r"no layout .* shape \(6, 5, 3, 16\)"),
    "another shape on a CPU": (Layer(CpuVector(), "CPU_ATTN"), JOINED[:, :1], "expected .blocks, 2, block size, 32"),
    "three parts": (Layer(Separate()), (JOINED, JOINED, JOINED), "tuple of 3"),
    "an index of tokens": (Layer(Joined(), indexer=object(), **LATENT_SIZES), ROWS, "index of their own keys"),
    "rows of another size": (Layer(Joined(), **LATENT_SIZES), ROWS[..., 1:], r"expected \[blocks, block size, 32\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cache_that_is_not_known_for_certain_is_refused_with_the_reason(name: str) -> None:
    layer, cache, reason = REFUSED[name]
    with pytest.raises(NotMovable, match=rf"^model\.layers\.0.*({reason})"):
        find_layout("model.layers.0", layer, cache)


def test_a_backend_without_a_writer_is_believed_by_the_shape_of_its_cache() -> None:
    assert find_layout("layer", Layer(object()), JOINED).block_size == SIZE
