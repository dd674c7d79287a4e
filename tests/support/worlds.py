"""Worlds for backends that take whole layers: one layer, pools full of random keys, and a step over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from kvmosaic.attention import AttentionBackend, Piece, RowGroup, StepAttention
from kvmosaic.layers import AttentionCall, LayerSpec, MaskSpec
from kvmosaic.layers.geometry import FULL
from kvmosaic.memory import BlockStorage
from kvmosaic.rope import Rotation
from support.plain import PlainBackend

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Of outputs of order 1; bfloat16 has 8 bits, float16 11, and the weights are rounded to them too."""


def layer_of(
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    rotation: Rotation | None = None,
    mask: MaskSpec = FULL,
    **others: Any,
) -> LayerSpec:
    """Layer 0 of a model, as storage and step attention see it."""
    return LayerSpec(0, num_kv_heads, key_dim, value_dim, rotation=rotation, mask=mask, **others)


class World:
    """One layer, both pools full of random keys, and a step over them."""

    def __init__(self, layer, groups, num_heads, dtype=torch.float32, num_slots=256, softcap=None, device=CPU):
        self.layer, self.groups, self.dtype, self.device = layer, groups, dtype, device
        shapes = ((layer.num_kv_heads, layer.key_dim), (layer.num_kv_heads, layer.value_dim))
        self.stored = {
            pool: [torch.randn(num_slots, *shape).to(dtype) for shape in shapes] for pool in ("request", "chunk_cache")
        }
        num_rows = max(group.first_row + group.num_rows for group in groups)
        heads = ((num_heads, layer.key_dim), *shapes)
        # [heads, T, D] seen as [T, heads, D]: what transformers hands over
        self.rows = [torch.randn(count, num_rows, dim).to(dtype).transpose(0, 1) for count, dim in heads]
        self.softcap = softcap

    def attend(self, backend: AttentionBackend, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Outputs of the step, [T, H, Dv], on the CPU."""
        dtype = dtype or self.dtype
        storages = {}
        for pool, tensors in self.stored.items():
            storages[pool] = BlockStorage([self.layer], len(tensors[0]), 1, dtype, self.device)
            storages[pool].write(0, slice(None), *(tensor.to(self.device, dtype) for tensor in tensors))
        query, key, value = (tensor.to(self.device, dtype) for tensor in self.rows)
        call = AttentionCall(
            0, query, key, value, self.layer.key_dim**-0.5, self.softcap, sinks=None, module=torch.nn.Identity()
        )
        return StepAttention([self.layer], storages, self.groups, (), backend)(call).cpu()

    def check(self, backend: AttentionBackend, tolerances: Mapping[torch.dtype, float] = TOLERANCES) -> None:
        """Compares with the plain backend in float64."""
        expected = self.attend(PlainBackend(), torch.float64)
        result = self.attend(backend)
        assert result.dtype is self.dtype
        torch.testing.assert_close(result.double(), expected, atol=tolerances[self.dtype], rtol=0)


def rotation_of(layout: str, rotary_dim: int, head_dim: int) -> Rotation:
    return Rotation(
        layout, 0, rotary_dim, 1, tuple(100.0 ** (-i / rotary_dim) for i in range(rotary_dim // 2)), head_dim
    )


@st.composite
def worlds(
    draw,
    dtypes: Sequence[torch.dtype],
    dims: Sequence[int] = (8, 16, 20, 64, 80, 256),
    num_rows: Sequence[int] = (1, 1, 2, 7, 40, 150),
    max_run: int = 200,
    device: torch.device = CPU,
):
    """Random worlds: some groups of rows, each over some runs that may overlap and may be shared."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 9]))
    key_dim = draw(st.sampled_from(dims))
    value_dim = draw(st.sampled_from([key_dim, key_dim, 12]))
    groups, first = [], 0
    for _ in range(draw(st.integers(1, 4))):
        count, position = draw(st.sampled_from(num_rows)), draw(st.integers(200, 300))
        reads = [
            Piece(
                draw(st.sampled_from(["request", "chunk_cache"])),
                draw(st.integers(0, 40)),
                draw(st.integers(1, max_run)),
                draw(st.integers(0, position)),
                draw(st.sampled_from([0, 0, 1, -7, 3000])),
            )
            for _ in range(draw(st.integers(0, 4)))
        ]
        reads_itself = count == 1 and bool(reads) and draw(st.booleans())
        groups.append(RowGroup(first, count, position, tuple(reads), reads_itself))
        first += count
    mask = draw(st.sampled_from([MaskSpec(), MaskSpec(), MaskSpec("window", 150), MaskSpec("chunked", 64)]))
    if mask.kind != "full":  # somebody must be seen
        groups = [RowGroup(g.first_row, g.num_rows, g.position, g.reads) for g in groups]
    rotation = rotation_of(draw(st.sampled_from(["half", "interleaved"])), 8, key_dim)
    layer = layer_of(num_kv_heads, key_dim, value_dim, rotation, mask)
    dtype, softcap = draw(st.sampled_from(list(dtypes))), draw(st.sampled_from([None, None, 4.0]))
    return World(layer, groups, num_kv_heads * group, dtype, softcap=softcap, device=device)
