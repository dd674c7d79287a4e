"""Documents read in place: own tokens and reads of a prompt, against its layout."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.vllm.contract import Composition
from kvmosaic.vllm.scheduler.chunk_prompts import repaired_runs, take_apart
from kvmosaic.vllm.scheduler.in_place import InPlacePlan

BLOCK = 4


def runs_in(chunks):
    """Runs of repaired tokens in each of these chunks, as `Composition.repair` has them."""
    chosen = (
        st.sets(st.integers(0, length)).map(lambda bounds: sorted(bounds)[: len(bounds) // 2 * 2]) for length in chunks
    )
    return st.tuples(*(each.map(tuple) for each in chosen))


@st.composite
def compositions(draw):
    chunks = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    texts = tuple(draw(st.integers(0, 3)) for _ in chunks)
    strategy = draw(st.sampled_from(["sequential", "shared"]))
    return Composition(
        system=draw(st.integers(0, 6)),
        chunks=chunks,
        texts=texts,
        position_strategy=strategy,
        chunk_context=draw(st.sampled_from(["system", "companions", "none"])),
        companions=draw(st.sampled_from([(), ((7, 8, 9), (5,))])),
        repair=draw(st.integers(0, 5) | runs_in(chunks)) if strategy == "sequential" else 0,
    )


def planned(composition, question=3):
    tokens = list(range(100, 100 + composition.end + question))
    layout = composition.layout(tokens)
    prompts, pieces = take_apart(layout, BLOCK)
    return tokens, layout, prompts, InPlacePlan.of(layout, pieces, composition.repair)


@given(compositions())
def test_each_token_is_computed_once_or_read_where_it_is_stored(composition):
    tokens, layout, prompts, plan = planned(composition)
    own = plan.own_tokens(tokens)
    assert len(own) == plan.num_own and own == sorted(own)
    read = []
    for piece in plan.pieces[: plan.num_read]:
        part = tokens[piece.start : piece.stop]
        assert list(prompts[piece.prompt].token_ids[piece.offset : piece.offset + len(part)]) == part
        read += part
    assert sorted(own + read) == tokens
    repaired = repaired_runs(layout, composition.repair)
    documents = {
        token
        for index, span in enumerate(layout.spans)
        if span.segment.kind == "chunk"
        for at, token in enumerate(span.token_ids)
        if not any(at in run for run in repaired.get(index, ()))
    }
    assert set(read) == documents


@given(compositions())
def test_positions_and_what_is_seen_are_those_of_the_layout(composition):
    tokens, layout, _, plan = planned(composition)
    position_of, start = {}, 0
    for index, span in enumerate(layout.spans):
        if span.is_companion:
            continue
        first = layout.position_of(index)
        position_of |= {tokens[start + at]: first + at for at in range(span.num_tokens)}
        start += span.num_tokens
    own = plan.own_tokens(tokens)
    for index, token in enumerate(own):
        shift = next((shift for first, shift in reversed(plan.shifts) if first <= index), 0)
        assert index + shift == position_of[token]
    for first, piece in zip(plan.first_readers, plan.pieces, strict=False):
        assert piece.offset + piece.distance == position_of[tokens[piece.start]]
        assert [token for token in own if token > tokens[piece.start]] == own[first:]
