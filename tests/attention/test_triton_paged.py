"""The GPU kernel over a paged cache, interpreted on the CPU, gives what a dense softmax in float64 gives.

With TRITON_INTERPRET=0 the same tests run on a GPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.attention import Piece, RowGroup, plan_reads
from kvmosaic.layers.geometry import FULL
from kvmosaic.rope import RotationTables

if sys.platform != "linux":
    pytest.skip("Triton is for Linux only", allow_module_level=True)

from kvmosaic.attention.triton import backend, work
from kvmosaic.attention.triton.backend import PagedCache, TritonBackend, TritonReader, why_not_paged

IS_INTERPRETED = TritonBackend.is_interpreted
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
TOLERANCES = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2 if IS_INTERPRETED else 2e-2}
"""Of outputs of order 1. The interpreter cuts bfloat16 off where a GPU rounds it."""
LAYOUTS = ("heads first", "tokens first", "stacked")


@dataclass
class Paged:
    """A paged cache of random numbers, and runs in it.

    `heads first` and `tokens first` are vLLM's [B, H, N, K|V] with two orders of memory; `stacked` is [N, 2, P, G, D].
    """

    layout: str
    num_blocks: int
    cache_block: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    scales: tuple[float, float] | None = None

    def __post_init__(self):
        blocks, size, heads = self.num_blocks, self.cache_block, self.num_kv_heads
        both = self.key_dim + self.value_dim
        if self.layout == "stacked":
            assert self.key_dim == self.value_dim
            cache = torch.randn(blocks, 2, size, heads, self.key_dim).to(DEVICE, self.dtype)
            self.keys, self.values = cache[:, 0], cache[:, 1]
        elif self.layout == "tokens first":
            cache = torch.randn(blocks, size, heads, both).to(DEVICE, self.dtype)
            self.keys, self.values = cache.split((self.key_dim, self.value_dim), -1)
        else:
            rows = torch.randn(blocks, heads, size, both).to(DEVICE, self.dtype).transpose(1, 2)
            self.keys, self.values = rows.split((self.key_dim, self.value_dim), -1)
        self.stored = cache if self.layout != "heads first" else rows
        self.before = self.stored.clone()

    def dense(self, slots):
        """Keys and values of slots, in float64."""
        place = slots // self.cache_block, slots % self.cache_block
        factors = self.scales or (1.0, 1.0)
        read = (self.keys, self.values)
        return [each.double()[place] * factor for each, factor in zip(read, factors, strict=True)]

    def pages(self, table, block_size):
        scales = None if self.scales is None else tuple(torch.tensor(s, device=DEVICE) for s in self.scales)
        return PagedCache(
            self.keys, self.values, torch.tensor(table, dtype=torch.int32, device=DEVICE), block_size, scales
        )


def turned_by(plan, dim):
    """Tables that turn the stacked queries by the distances of their runs, halves paired."""
    angles = -plan.distances.cpu().double()[:, None] * 0.5 ** torch.arange(dim // 2)
    cos, sin = angles.cos().repeat(1, 2), torch.cat([-angles.sin(), angles.sin()], -1)
    partners = torch.arange(dim).roll(dim // 2)
    tables = (cos.float()[:, None].to(DEVICE), sin.float()[:, None].to(DEVICE), partners.to(DEVICE))
    return RotationTables(*tables, rotation=None), lambda x, i: x * cos[i] + x[..., partners] * sin[i]


def expected(query, plan, paged, slots, scaling, softcap, turn):
    """Softmax over all keys that a row sees, written out: outputs and log-sum-exp."""
    group = query.shape[1] // paged.num_kv_heads
    outputs, sums = [], []
    for row in range(plan.num_rows):
        scores, values = [], []
        for call in plan.calls:
            for index in range(call.first, call.last):
                if plan.row_numbers[index] != row:
                    continue
                seen = call.num_tokens if not call.causal else index - call.first + 1
                keys, value = paged.dense(slots[call.first_slot : call.first_slot + seen])
                reader = turn(query[row].double().cpu(), index) if turn else query[row].double().cpu()
                keys, value = (each.cpu().repeat_interleave(group, 1) for each in (keys, value))
                score = torch.einsum("hd,shd->hs", reader, keys) * scaling
                scores.append(softcap * torch.tanh(score / softcap) if softcap else score)
                values.append(value)
        score = torch.cat(scores, 1)
        sums.append(score.logsumexp(1))
        outputs.append(torch.einsum("hs,shd->hd", score.softmax(1), torch.cat(values)))
    return torch.stack(outputs), torch.stack(sums)


@st.composite
def steps(draw):
    """Rows of a few requests over runs that begin and end inside blocks."""
    parts = draw(st.sampled_from([1, 2]))
    cache_block = draw(st.sampled_from([4, 16]))
    size = parts * cache_block
    num_blocks = 12
    table, groups, row = [], [], 0

    def place(start, num_tokens):
        first = len(table) * size + start
        table.extend(draw(st.integers(0, num_blocks - 1)) for _ in range(-(-(start + num_tokens) // size)))
        return first

    documents = [
        (place(start, count), count)
        for start, count in draw(
            st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, 2 * size + 3)), min_size=1, max_size=3)
        )
    ]
    own = {}
    for _ in range(draw(st.integers(1, 3))):
        before, count = draw(st.integers(0, size)), draw(st.sampled_from([1, 1, 2, 5]))
        slot = place(0, before + count)
        reads = [Piece("chunk_cache", slot, before, 0)] if before else []
        for first, number in draw(st.lists(st.sampled_from(documents), unique=True)):
            reads.append(Piece("chunk_cache", first, number, 0, draw(st.sampled_from([0, 3, 40]))))
        groups.append(RowGroup(row, count, 100, tuple(reads)))
        own[row] = slot + before
        row += count
    plan = plan_reads(groups, FULL, DEVICE)
    calls = tuple(
        call if call.pool else replace(call, pool="chunk_cache", first_slot=own[call.first_slot]) for call in plan.calls
    )
    return replace(plan, calls=calls), table, size, cache_block, parts * num_blocks


def check(plan, table, size, paged, group, *, softcap=None, dtype=None, scaling=0.3):
    dtype = dtype or paged.dtype
    query = torch.randn(plan.num_rows, group * paged.num_kv_heads, paged.key_dim).to(DEVICE, dtype)
    slots = (torch.tensor(table)[:, None] * size + torch.arange(size)).flatten().to(DEVICE)
    tables, turn = turned_by(plan, paged.key_dim) if plan.is_moved else (None, None)
    output, lse = TritonReader(plan).attend_paged(
        query, paged.pages(table, size), scaling=scaling, softcap=softcap, tables=tables
    )
    wanted, sums = expected(query, plan, paged, slots, scaling, softcap, turn)
    for found, right in ((output, wanted), (lse, sums)):
        assert (found.cpu().double() - right).abs().max() <= 3 * TOLERANCES[dtype] * max(1, right.abs().max())
    assert torch.equal(paged.stored.view(torch.uint8), paged.before.view(torch.uint8)), "nothing is written"


@settings(max_examples=examples(25))
@given(
    step=steps(),
    layout=st.sampled_from(LAYOUTS),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 8)]),
    dim=st.sampled_from([8, 20, 32]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    softcap=st.sampled_from([None, 2.0]),
    walk=st.sampled_from([16, 256]),
    seed=st.integers(0, 1000),
)
def test_paged_reads_are_a_dense_softmax(step, layout, heads, dim, dtype, softcap, walk, seed):
    torch.manual_seed(seed)
    plan, table, size, cache_block, num_blocks = step
    paged = Paged(layout, num_blocks, cache_block, heads[0], dim, dim, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work, "MIN_WALK", walk)
        check(plan, table, size, paged, heads[1], softcap=softcap)


@settings(max_examples=10)
@given(
    step=steps(),
    stored=st.sampled_from(backend.QUANTIZED_DTYPES),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    scales=st.tuples(st.floats(0.1, 2), st.floats(0.1, 2)),
)
def test_eight_bits_are_read_with_their_scales(step, stored, layout, dtype, scales):
    plan, table, size, cache_block, num_blocks = step
    torch.manual_seed(0)
    scales = tuple(float(torch.tensor(each)) for each in scales)
    paged = Paged(layout, num_blocks, cache_block, 2, 16, 16, stored, scales)
    check(plan, table, size, paged, 2, dtype=dtype)


def test_keys_and_values_of_different_sizes():
    torch.manual_seed(0)
    plan = plan_reads([RowGroup(0, 1, 9, (Piece("chunk_cache", 3, 17, 0, 4),), reads_itself=True)], FULL, DEVICE)
    check(plan, [5, 1, 0], 8, Paged("tokens first", 6, 8, 2, 24, 16, torch.float32), 2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"dtype": torch.float64}, "queries in torch.float64"),
        ({"dtype": torch.float16}, "a cache in torch.float32"),
        ({"key_dim": 300}, "heads of 300 numbers"),
        ({"group": 200}, "200 query heads per key head"),
        ({"step": 2}, "not adjacent"),
    ],
)
def test_what_the_kernel_does_not_read_has_a_reason(change, reason):
    keys, values = (
        torch.zeros(2, 4, 1, change.get("key_dim", 8) * change.get("step", 1), device=DEVICE)[
            ..., :: change.get("step", 1)
        ]
        for _ in range(2)
    )
    found = why_not_paged(change.get("dtype", torch.float32), change.get("group", 2), keys, values)
    assert reason in found and bool(found) == bool(reason)
