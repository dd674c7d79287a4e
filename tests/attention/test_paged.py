"""Paged attention against a dense twin: gather each sequence's tokens from its blocks, mask, softmax."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.programs import needs_extension
from torch import Tensor

from kvmosaic.attention import NativeBackend, TorchBackend, paged_attention, plan_paged_attention
from kvmosaic.errors import InvalidConfig

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2}


@dataclass
class Batch:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: list[list[int]]
    context_lens: list[int]
    query_lens: list[int]

    def attend(self, **options: object) -> Tensor:
        sequences = self.block_tables, self.context_lens
        return paged_attention(
            self.query, self.key_cache, self.value_cache, *sequences, query_lens=self.query_lens, **options
        )


def dense_twin(batch: Batch, scaling: float, softcap: float | None, window: int | None, sinks: Tensor | None) -> Tensor:
    outputs, first = [], 0
    for table, context, count in zip(batch.block_tables, batch.context_lens, batch.query_lens, strict=True):
        query = batch.query[first : first + count].double()
        group = query.shape[1] // batch.key_cache.shape[2]
        key, value = (
            torch.cat([cache[block] for block in table])[:context].double().repeat_interleave(group, 1)
            for cache in (batch.key_cache, batch.value_cache)
        )
        scores = torch.einsum("thd,shd->ths", query, key) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(context - count, context)[:, None] - torch.arange(context)[None]
        hidden = (distance < 0) | (distance >= (window or math.inf))
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[None, :, None].expand(count, -1, 1)], -1)
        outputs.append(torch.einsum("ths,shd->thd", scores.softmax(-1)[..., :context], value))
        first += count
    return torch.cat(outputs)


def contiguous(num_blocks: int, size: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_blocks, size, heads, width, dtype=dtype)


def interleaved(num_blocks: int, size: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    """As an engine that keeps keys and values of a block side by side."""
    return torch.randn(num_blocks, 2, size, heads, width, dtype=dtype)[:, 1]


def heads_first(num_blocks: int, size: int, heads: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_blocks, heads, size, width, dtype=dtype).transpose(1, 2)


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Batch:
    torch.manual_seed(draw(st.integers(0, 2**31)))
    size, num_blocks = draw(st.sampled_from([1, 2, 4, 16])), draw(st.integers(1, 12))
    heads, group, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([8, 16]))
    value_width = draw(st.sampled_from([width, 4]))
    make = draw(st.sampled_from([contiguous, interleaved, heads_first]))
    if make is not contiguous:
        value_width = width
    shape = (num_blocks, size, heads)
    tables, contexts, counts = [], [], []
    for _ in range(draw(st.integers(1, 5))):
        context = draw(st.integers(1, min(num_blocks * size, 40)))
        blocks = st.permutations(range(num_blocks))
        tables.append(draw(blocks)[: -(-context // size) + draw(st.integers(0, 2))])
        contexts.append(context)
        counts.append(draw(st.integers(1, min(context, 6))))
    return Batch(
        torch.randn(sum(counts), heads * group, width, dtype=dtype),
        make(*shape, width, dtype),
        make(*shape, value_width, dtype),
        tables,
        contexts,
        counts,
    )


@settings(max_examples=examples(150), deadline=None)
@given(
    batches(),
    st.sampled_from([None, 0.3]),
    st.sampled_from([None, 5.0]),
    st.sampled_from([None, 1, 3, 17]),
    st.booleans(),
)
def test_it_equals_dense_attention(
    batch: Batch, scaling: float | None, softcap: float | None, window: int | None, has_sinks: bool
) -> None:
    sinks = torch.randn(batch.query.shape[1], dtype=torch.float64) if has_sinks else None
    expected = dense_twin(batch, scaling or batch.query.shape[2] ** -0.5, softcap, window, sinks)
    output = batch.attend(scaling=scaling, softcap=softcap, window=window, sinks=sinks)
    assert output.shape == expected.shape and output.dtype == batch.query.dtype
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [TorchBackend, pytest.param(NativeBackend, marks=needs_extension)])
def test_backends_and_dtypes_agree_with_dense_attention(make: type[TorchBackend], dtype: torch.dtype) -> None:
    @settings(max_examples=examples(40), deadline=None)
    @given(batches(dtype), st.sampled_from([None, 4]))
    def check(batch: Batch, window: int | None) -> None:
        expected = dense_twin(batch, batch.query.shape[2] ** -0.5, None, window, None)
        output = batch.attend(window=window, backend=make())
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=TOLERANCE[dtype])

    check()


def small(**changes: object) -> Batch:
    parts = {
        "query": torch.randn(2, 4, 8),
        "key_cache": torch.randn(6, 4, 2, 8),
        "value_cache": torch.randn(6, 4, 2, 8),
        "block_tables": [[3, 1], [3, 5, 0]],
        "context_lens": [6, 9],
        "query_lens": [1, 1],
    }
    return Batch(**{**parts, **changes})


def test_tensors_and_lists_say_the_same_and_decode_is_the_default() -> None:
    batch = small()
    tables = torch.tensor([[3, 1, -1], [3, 5, 0]], dtype=torch.int32)
    output = paged_attention(batch.query, batch.key_cache, batch.value_cache, tables, torch.tensor([6, 9]))
    assert torch.equal(output, batch.attend())
    rows = [np.array([3, 1]), array("i", [3, 5, 0])]
    assert torch.equal(output, paged_attention(batch.query, batch.key_cache, batch.value_cache, rows, np.array([6, 9])))


def test_it_writes_nothing_and_copies_nothing_of_the_cache() -> None:
    batch = small()
    before = batch.key_cache.clone(), batch.value_cache.clone()
    reads: list[tuple[int, int]] = []

    class Watching(TorchBackend):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> tuple[Tensor, Tensor]:
            reads.append((key.untyped_storage().data_ptr(), value.untyped_storage().data_ptr()))
            return super().attend(query, key, value, **options)

    batch.attend(backend=Watching())
    owned = (batch.key_cache.untyped_storage().data_ptr(), batch.value_cache.untyped_storage().data_ptr())
    assert set(reads) == {owned}
    assert torch.equal(batch.key_cache, before[0]) and torch.equal(batch.value_cache, before[1])


def test_runs_that_sequences_share_are_read_once_for_all_of_them() -> None:
    rows: list[int] = []

    class Counting(TorchBackend):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: object) -> tuple[Tensor, Tensor]:
            rows.append(len(query))
            return super().attend(query, key, value, **options)

    small(block_tables=[[3, 1], [3, 5, 0]], context_lens=[8, 12]).attend(backend=Counting())
    assert rows == [2, 1, 1, 1]
    rows.clear()
    small(block_tables=[[1, 2, 5], [1, 2, 3, 4]], context_lens=[12, 15]).attend(backend=Counting())
    assert rows == [2, 1, 1], "blocks 1 and 2 once for both, 5, and 3 and 4"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_cache": torch.zeros(6, 8)}, r"key_cache is \[6, 8\].*give \[blocks, block_size, kv_heads, head_dim\]"),
        ({"value_cache": torch.zeros(5, 4, 2, 8)}, "same blocks, block_size and kv_heads"),
        ({"query": torch.zeros(2, 3, 8)}, "must divide the heads"),
        ({"query": torch.zeros(2, 4, 16)}, "head_dim must be the same"),
        ({"query": torch.zeros(2, 4, 8).double()}, "convert them to one dtype and device"),
        ({"query": torch.zeros(2, 4, 8).long()}, "floating point"),
        ({"context_lens": [6]}, "2 block_tables, 1 context_lens"),
        ({"context_lens": [6, 0]}, "context_lens must be whole numbers from 1"),
        ({"context_lens": [6, 13]}, "sequence 1 has 13 tokens and 3 blocks of 4; it needs 4"),
        ({"query_lens": [1, 2]}, "query has 2 rows, but the sequences have 3"),
        ({"query": torch.zeros(8, 4, 8), "query_lens": [7, 1]}, "sequence 0 has 7 queries and 6 tokens"),
        ({"block_tables": [[3, 6], [3, 5, 0]]}, "sequence 0 has block 6; the cache has blocks 0 to 5"),
        ({"block_tables": [[3, 1], [-1, 5, 0]]}, "sequence 1 has block -1"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        small(**changes).attend()


@pytest.mark.parametrize(
    ("options", "message"), [({"window": 0}, "window must be"), ({"sinks": torch.zeros(3)}, "one number for each")]
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        small().attend(**options)


def test_uneven_slots_are_refused_with_the_way_out() -> None:
    uneven = torch.zeros(6 * 65).as_strided((6, 4, 2, 8), (65, 16, 8, 1))
    with pytest.raises(InvalidConfig, match=r"not evenly spaced; pass both with .contiguous\(\)"):
        small(key_cache=uneven).attend()
    assert small(key_cache=uneven.contiguous()).attend().shape == (2, 4, 8)


def two_layers(window=None):
    """Caches of two layers, queries of a prefill and two decodes over them, and their plan."""
    torch.manual_seed(0)
    caches = [torch.randn(2, 9, 4, 2, 8) for _ in range(2)]
    given = [[5, 2, 0], [5, 7], [1]], [11, 6, 3]
    return caches, torch.randn(2, 5, 4, 8), {"query_lens": [3, 1, 1], "window": window}, given


@pytest.mark.parametrize("window", [None, 3])
def test_one_plan_is_for_all_layers(window):
    caches, queries, options, given = two_layers(window)
    plan = plan_paged_attention(*caches[0], *given, **options)
    for cache, query in zip(caches, queries, strict=True):
        assert torch.equal(plan.attend(query, *cache), paged_attention(query, *cache, *given, **options))


def test_a_plan_reads_nothing_back(monkeypatch):
    caches, queries, options, given = two_layers()
    plan = plan_paged_attention(
        *caches[0], *map(torch.tensor, [[[5, 2, 0], [5, 7, 0], [1, 0, 0]], given[1]]), **options
    )
    expected = paged_attention(queries[0], *caches[0], *given, **options)
    for name in ("tolist", "item", "__bool__", "__int__", "__index__", "numpy"):
        monkeypatch.setattr(Tensor, name, lambda *_: pytest.fail("a device would be waited for"))
    output = plan.attend(queries[0], *caches[0])
    monkeypatch.undo()
    assert torch.equal(output, expected)


@pytest.mark.slow
def test_a_plan_compiles_to_one_graph():
    caches, queries, options, given = two_layers()
    plan = plan_paged_attention(*caches[0], *given, **options, backend=TorchBackend())
    attend = torch.compile(lambda query, cache: plan.attend(query, *cache), fullgraph=True, backend="eager")
    for cache, query in zip(caches, queries, strict=True):
        assert torch.equal(attend(query, cache), plan.attend(query, *cache))


def test_a_plan_is_for_caches_of_its_shape():
    caches, queries, options, given = two_layers()
    plan = plan_paged_attention(*caches[0], *given, **options)
    with pytest.raises(InvalidConfig, match=r"for 9 blocks of 4 slots, 4 apart, and the cache has 8 of 4"):
        plan.attend(queries[0], *caches[0][:, :8])
    with pytest.raises(InvalidConfig, match="query has 4 rows, but the sequences have 5"):
        plan.attend(queries[0, :4], *caches[0])
