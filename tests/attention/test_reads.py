"""Read plans: windows and chunks trim reads exactly, equal runs are read once, merging is exact."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from kvmosaic.attention import Call, Piece, RowGroup, merge_partials, plan_reads
from kvmosaic.layers import MaskSpec
from kvmosaic.layout import Visibility

CPU = torch.device("cpu")


def shows(mask: MaskSpec, query: int, key: int) -> bool:
    if mask.kind == "window":
        return query - key < mask.size
    return mask.kind == "full" or query // mask.size == key // mask.size


masks = st.one_of(
    st.just(MaskSpec()),
    st.integers(1, 40).map(lambda size: MaskSpec("window", size)),
    st.integers(1, 40).map(lambda size: MaskSpec("chunked", size)),
)


@st.composite
def row_groups(draw):
    groups, first = [], 0
    for _ in range(draw(st.integers(1, 4))):
        count, position = draw(st.integers(1, 6)), draw(st.integers(30, 90))
        reads = []
        for _ in range(draw(st.integers(0, 3))):
            length = draw(st.integers(1, 20))
            start = draw(st.integers(0, position - length))
            slot = draw(st.sampled_from([0, 40, 80]))
            reads.append(Piece(draw(st.sampled_from(["request", "chunk_cache"])), slot, length, start, start - slot))
        groups.append(RowGroup(first, count, position, tuple(reads)))
        first += count
    return groups


def shown_by(plan, row):
    """Everything that a row reads: (pool or None, slot or row)."""
    seen = []
    for call in plan.calls:
        assert isinstance(call, Call)
        for number in range(call.first, call.last):
            if int(plan.rows[number]) != row:
                continue
            for key in range(call.num_tokens):
                masked = call.mask is not None and not bool(call.mask[number - call.first, key])
                future = call.causal and key > number - call.first
                if not masked and not future:
                    seen.append((call.pool, call.first_slot + key, int(plan.distances[number])))
    return sorted(seen, key=str)


@settings(max_examples=examples(80))
@given(row_groups(), masks)
def test_every_row_reads_exactly_what_the_mask_shows(groups, mask):
    plan = plan_reads(groups, mask, CPU)
    for group in groups:
        for offset in range(group.num_rows):
            query = group.position + offset
            expected = [
                (read.pool, read.first_slot + key, read.distance)
                for read in group.reads
                for key in range(read.num_tokens)
                if shows(mask, query, read.position + key)
            ]
            expected += [
                (None, group.first_row + other, 0)
                for other in range(offset + 1)
                if shows(mask, query, group.position + other)
            ]
            assert shown_by(plan, group.first_row + offset) == sorted(expected, key=str)


def test_readers_of_one_run_are_stacked_into_one_call():
    run = Piece("chunk_cache", 32, 16, 10, 0)
    groups = [RowGroup(row, 1, 60 + row, (run, Piece("request", 8 * row, 4, 56 + row)), True) for row in range(5)]
    plan = plan_reads(groups, MaskSpec(), CPU)
    shared = [call for call in plan.calls if call.pool == "chunk_cache"]
    assert len(shared) == 1 and shared[0].last - shared[0].first == 5
    assert len(plan.calls) == 1 + 5


def test_a_single_sequence_needs_no_stacking_and_no_merging():
    plan = plan_reads([RowGroup(0, 1, 9, (Piece("request", 0, 10, 0),), True)], MaskSpec(), CPU)
    assert plan.is_single and not plan.is_moved and len(plan.calls) == 1
    assert plan_reads([RowGroup(0, 7, 0, ())], MaskSpec(), CPU).is_single


def test_repaired_rows_read_up_to_their_ends_and_nothing_hidden():
    seen = Visibility(hidden=(1, 3), ends=(0, 2, 5))
    group = RowGroup(0, 3, 40, (Piece("chunk_cache", 8, 6, 10, 10, visibility=seen),))
    plan = plan_reads([group], MaskSpec(), CPU)
    slots = [[slot for pool, slot, _ in shown_by(plan, row) if pool == "chunk_cache"] for row in range(3)]
    assert slots == [[], [8], [10, 12, 8]], "in the order of their texts"


def test_a_row_that_sees_nothing_is_zero():
    nothing = torch.full((1, 2), -torch.inf, dtype=torch.float64)
    merged, total = merge_partials(torch.zeros(1, 2, 5, dtype=torch.float64), nothing, torch.tensor([0]), 1)
    assert torch.equal(merged, torch.zeros_like(merged)) and torch.equal(total, nothing)


@settings(max_examples=examples(40))
@given(st.integers(0, 2**31), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))
def test_merging_parts_equals_one_softmax(seed, num_rows, num_parts, num_heads):
    torch.manual_seed(seed)
    scores = torch.randn(num_parts, num_rows, num_heads, 7, dtype=torch.float64) * 20
    values = torch.randn(num_parts, num_rows, num_heads, 7, 5, dtype=torch.float64)
    outputs = torch.einsum("prhs,prhsd->prhd", scores.softmax(-1), values)
    lse = scores.logsumexp(-1)
    rows = torch.arange(num_rows).repeat(num_parts)
    hidden = torch.full((1, num_heads), -torch.inf, dtype=torch.float64)
    empty = torch.zeros(1, num_heads, 5, dtype=torch.float64)
    merged, total = merge_partials(
        torch.cat([outputs.flatten(0, 1), empty]),
        torch.cat([lse.flatten(0, 1), hidden]),
        torch.cat([rows, torch.tensor([0])]),
        num_rows,
    )
    every_score, every_value = scores.permute(1, 2, 0, 3).flatten(2), values.permute(1, 2, 0, 3, 4).flatten(2, 3)
    expected = torch.einsum("rhs,rhsd->rhd", every_score.softmax(-1), every_value)
    torch.testing.assert_close(merged, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(total, every_score.logsumexp(-1), atol=1e-10, rtol=0)
