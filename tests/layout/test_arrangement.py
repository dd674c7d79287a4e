"""Layouts as literals, and what must hold for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.errors import InvalidConfig, InvalidOffset, InvalidPrompt, InvalidSees
from kvmosaic.layout import View, arrange, composition_of, dense
from kvmosaic.prompt import Prompt, Segment, SegmentKind

PROMPT = Prompt.from_tokens([1, 2, 3], [[4, 5], [6, 7, 8]], [9, 10])


def places(strategy, context="system", prompt=PROMPT):
    layout = arrange(prompt, strategy, context)
    return [span.start for span in layout.spans], [layout.position_of(index) for index in range(len(layout.spans))]


def test_shared_chunks_all_start_after_the_system_prompt():
    assert places("shared") == ([0, 3, 3, 6], [0, 3, 3, 6])


def test_sequential_chunks_are_computed_after_the_system_prompt_and_moved():
    assert places("sequential") == ([0, 3, 3, 8], [0, 3, 5, 8])


def test_blind_chunks_are_computed_from_position_0_and_moved():
    assert places("shared", "none") == ([0, 0, 0, 6], [0, 3, 3, 6])
    assert places("sequential", "none") == ([0, 0, 0, 8], [0, 3, 5, 8])


def test_absolute_chunks_stay_where_they_were_baked():
    chunks = (
        Segment(SegmentKind.CHUNK, (4, 5), position_offset=10),
        Segment(SegmentKind.CHUNK, (6,), position_offset=5),
    )
    prompt = Prompt((PROMPT.segments[0], *chunks, PROMPT.segments[-1]))
    assert places("absolute", prompt=prompt) == ([0, 10, 5, 12], [0, 10, 5, 12])


def test_a_plain_prompt_is_one_causal_span_at_position_0():
    layout = arrange(Prompt.plain([5, 6, 7]))
    assert [(span.start, span.views) for span in layout.spans] == [(0, ())]
    assert np.array_equal(dense(layout).mask, np.tri(3, dtype=bool))


def test_visibility_is_the_table_of_the_design():
    mask = dense(arrange(PROMPT, "shared")).mask
    kinds = "sssaabbbqq"
    for row, reader in enumerate(kinds):
        for column, seen in enumerate(kinds):
            expected = column <= row and (reader == seen or seen == "s" or reader == "q")
            assert mask[row, column] == expected, (row, column)


def test_a_chunk_may_see_a_named_earlier_chunk():
    chunks = (
        Segment(SegmentKind.CHUNK, (4, 5)),
        Segment(SegmentKind.CHUNK, (6,)),
        Segment(SegmentKind.CHUNK, (7,), sees=(0,)),
    )
    prompt = Prompt((PROMPT.segments[0], *chunks, PROMPT.segments[-1]))
    shared, sequential = arrange(prompt, "shared"), arrange(prompt, "sequential")
    assert shared.spans[3].views == (View(0, 0), View(1, 0)) and shared.spans[3].start == 5
    assert [shared.position_of(i) for i in range(5)] == [0, 3, 3, 5, 6]
    assert sequential.spans[3].views == (View(0, 0), View(1, 0)) and sequential.spans[3].start == 5
    assert [sequential.position_of(i) for i in range(5)] == [0, 3, 5, 6, 7]
    assert dense(shared).mask[6, 3:5].all() and not dense(shared).mask[6, 5]


def test_a_chunk_may_be_seen_by_its_name():
    a, b = (Segment(SegmentKind.CHUNK, (4, 5), name=name) for name in ("a", "b"))
    by_name = Segment(SegmentKind.CHUNK, (7,), sees=("b",))
    layout = arrange(Prompt((PROMPT.segments[0], a, b, by_name, PROMPT.segments[-1])), "shared")
    assert layout.spans[3].views == (View(0, 0), View(2, 0))
    with pytest.raises(InvalidSees, match="no chunk before it has that name; before it: 'a'"):
        arrange(Prompt((a, by_name, b, PROMPT.segments[-1])))
    with pytest.raises(InvalidSees, match="names a chunk twice"):
        arrange(Prompt((a, Segment(SegmentKind.CHUNK, (7,), sees=("a", 0)), PROMPT.segments[-1])))


@pytest.mark.parametrize(
    ("sees", "told"),
    [
        ([(), ()], "documents do not see each other"),
        ([(), [0]], "documents saw everything before them"),
        ([(), [0], ()], "documents see only the ones named in sees"),
    ],
)
def test_the_composition_says_what_documents_see(sees, told):
    chunks = [Segment(SegmentKind.CHUNK, [9], sees=each) for each in sees]
    layout = arrange(Prompt((PROMPT.segments[0], *chunks, PROMPT.segments[-1])), "sequential")
    assert composition_of(layout) == f"composed (sequential): {told}"


@pytest.mark.parametrize("sees", [(0,), (1,), (-1,)])
def test_a_chunk_cannot_see_itself_or_a_later_one(sees):
    chunks = (Segment(SegmentKind.CHUNK, (4, 5), sees=sees), Segment(SegmentKind.CHUNK, (6,)))
    with pytest.raises(InvalidSees):
        arrange(Prompt((*chunks, PROMPT.segments[-1])))


@pytest.mark.parametrize(("strategy", "offset"), [("absolute", None), ("absolute", 2), ("absolute", -1), ("shared", 5)])
def test_offsets_must_fit_the_strategy(strategy, offset):
    with pytest.raises(InvalidOffset):
        chunk = Segment(SegmentKind.CHUNK, (4, 5), position_offset=offset)
        arrange(Prompt((PROMPT.segments[0], chunk, PROMPT.segments[-1])), strategy)


def test_unknown_strategies_are_refused():
    with pytest.raises(InvalidConfig, match="position_strategy is 'middle'"):
        arrange(PROMPT, "middle")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="chunk_context is 'all'"):
        arrange(PROMPT, "shared", "all")  # type: ignore[arg-type]


def test_prompts_need_their_question_last():
    chunk = Segment(SegmentKind.CHUNK, (1,))
    for segments in ((), (chunk,), (PROMPT.segments[-1], chunk), (chunk, PROMPT.segments[0], PROMPT.segments[-1])):
        with pytest.raises(InvalidPrompt):
            Prompt(segments)


lengths = st.integers(1, 6)


@given(
    st.integers(0, 5),
    st.lists(lengths, max_size=5),
    lengths,
    st.sampled_from(["shared", "sequential"]),
    st.sampled_from(["system", "none"]),
)
def test_every_layout_is_causal_and_shared_ones_are_one_dense_forward(
    num_system, chunk_lengths, num_question, strategy, context
):
    prompt = Prompt.from_tokens(
        [1] * num_system or None, [[2] * length for length in chunk_lengths], [3] * num_question
    )
    written = dense(arrange(prompt, strategy, context))
    assert not np.triu(written.mask, 1).any() and np.diag(written.mask).all()
    assert written.mask[-1].all()
    assert (written.question_positions[:-1] < written.question_positions[-1]).all()
    moved_away_from_system = strategy == "sequential" and context == "system" and num_system and len(chunk_lengths) > 1
    assert written.is_one_forward == (not moved_away_from_system)


@given(st.permutations(range(4)))
def test_the_order_of_chunks_moves_nothing_in_shared(order):
    bodies = [[1], [2, 2], [3, 3, 3], [4, 4]]
    layout = arrange(Prompt.from_tokens([9, 9], [bodies[i] for i in order], [8]), "shared")
    assert [layout.position_of(index) for index in range(6)] == [0, 2, 2, 2, 2, 5]
