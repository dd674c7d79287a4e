"""Repaired layouts as literals, and what every one of them shows: all that stands before a token, once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.layout import View, Visibility, arrange, dense, exact_spans, repaired
from kvmosaic.prompt import Prompt, Segment, SegmentKind

PROMPT = Prompt.from_tokens([1, 2, 3], [[4, 5], [6, 7, 8]], [9, 10])


@st.composite
def layouts(draw):
    """Layouts of any strategy and context; some chunks see earlier ones."""
    strategy, context = (
        draw(st.sampled_from(["shared", "sequential", "absolute"])),
        draw(st.sampled_from(["system", "none"])),
    )
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    chunks, offset = [], 30
    for number, length in enumerate(lengths):
        sees = draw(st.lists(st.integers(0, number - 1), unique=True, max_size=2)) if number else []
        chunk = Segment(SegmentKind.CHUNK, tuple(range(10 * number, 10 * number + length)), sees=tuple(sorted(sees)))
        if strategy == "absolute":
            chunk = replace(chunk, position_offset=offset)
            offset += length + draw(st.integers(0, 3))
        chunks.append(chunk)
    system = (
        [Segment(SegmentKind.SYSTEM, tuple(range(90, 90 + draw(st.integers(1, 5)))))] if draw(st.booleans()) else []
    )
    question = Segment(SegmentKind.QUESTION, tuple(range(80, 80 + draw(st.integers(1, 4)))))
    return arrange(Prompt((*system, *chunks, question)), strategy, context)


def behind_each_other(layout, places):
    """Where repaired tokens stand: as the question sees them, but in shared positions one chunk behind the other."""
    if layout.strategy != "shared":
        return places
    chunks = [index for index, span in enumerate(layout.spans) if span.segment.kind is SegmentKind.CHUNK]
    before = {index: sum(layout.spans[other].num_tokens for other in chunks if other < index) for index in chunks}
    first = places[chunks[0], 0] if chunks else 0
    return {
        (index, token): first + before[index] + token if index in before else place
        for (index, token), place in places.items()
    }


def choices(draw, layout):
    chunks = [index for index, span in enumerate(layout.spans) if span.segment.kind is SegmentKind.CHUNK]
    return {
        index: tuple(sorted(draw(st.sets(st.integers(0, layout.spans[index].num_tokens - 1), max_size=6))))
        for index in chunks
    }


def tokens_of(layout):
    """For every row of the written layout, which token of which original span it is; and whether it is repaired."""
    rows = []
    hidden = {
        view.span: (view.visibility or Visibility()).hidden
        for view in layout.last.views
        if not layout.spans[view.span].is_repair
    }
    number = 0
    for index, span in enumerate(layout.spans):
        if span.is_repair:
            rows += [(chunk, token, True) for chunk in sorted(hidden) for token in hidden[chunk]]
        else:
            rows += [(number, token, False) for token in range(span.num_tokens)]
            number += 1
        assert len(rows) == sum(other.num_tokens for other in layout.spans[: index + 1])
    return rows


@given(st.data())
def test_repaired_tokens_and_question_see_what_causal_reading_sees_each_token_once(data):
    layout = data.draw(layouts())
    chosen = choices(data.draw, layout)
    after = repaired(layout, chosen)
    before, written = dense(layout), dense(after)
    places = {token[:2]: int(before.question_positions[row]) for row, token in enumerate(tokens_of(layout))}
    placed_for_repair = behind_each_other(layout, places)
    rows = tokens_of(after)
    all_repaired = {(index, token) for index, tokens in chosen.items() for token in tokens}
    asked = len(layout.spans) - 1
    assert {(index, token) for index, token, is_repaired in rows if is_repaired} == all_repaired
    for row, (index, token, is_repaired) in enumerate(rows):
        if index != asked and not is_repaired:
            continue
        stands = placed_for_repair if is_repaired else places
        assert written.positions[row] == stands[index, token]
        seen = [rows[column] for column in np.flatnonzero(written.mask[row])]
        assert sorted(part[:2] for part in seen) == sorted(place for place in places if place <= (index, token))
        assert all(part[2] == (part[:2] in all_repaired) for part in seen)
        for column in np.flatnonzero(written.mask[row]):
            assert written.positions[column] + written.distances[row, column] == stands[rows[column][:2]]
    assert after.num_tokens == layout.num_tokens


@given(st.data())
def test_the_cached_spans_stay_as_they_were(data):
    layout = data.draw(layouts())
    after = repaired(layout, choices(data.draw, layout))
    assert after.spans[: len(layout.spans) - 1] == layout.spans[:-1]
    assert after.last.segment == layout.last.segment and after.last.start == layout.last.start


@given(layouts())
def test_exact_spans_are_those_whose_tokens_saw_everything_before_them_where_it_stands(layout):
    written = dense(layout)
    asked = written.question_positions
    computed = written.positions[None, :] + written.distances - written.positions[:, None]
    agrees = computed == asked[None, :] - asked[:, None]
    exact_rows: list[bool] = []
    for row in range(len(asked)):
        sees_all = written.mask[row, : row + 1].all() and agrees[row, : row + 1].all()
        exact_rows.append(bool(sees_all) and all(exact_rows))
    ends = np.cumsum([span.num_tokens for span in layout.spans])
    expected = {index for index, end in enumerate(ends[:-1]) if all(exact_rows[:end])}
    assert exact_spans(layout) == expected


def test_the_first_chunk_is_exact_and_the_others_are_not():
    assert exact_spans(arrange(PROMPT, "shared")) == {0, 1}
    assert exact_spans(arrange(PROMPT, "sequential")) == {0, 1}
    assert exact_spans(arrange(PROMPT, "shared", "none")) == {0}
    alone = Prompt.from_tokens(None, [[4, 5], [6]], [9])
    assert exact_spans(arrange(alone, "sequential", "none")) == {0}


def test_chunks_that_see_all_before_them_are_exact_in_their_order():
    chunks = (Segment(SegmentKind.CHUNK, (4, 5)), Segment(SegmentKind.CHUNK, (6,), sees=(0,)))
    prompt = Prompt((PROMPT.segments[0], *chunks, PROMPT.segments[-1]))
    assert exact_spans(arrange(prompt, "sequential")) == {0, 1, 2}
    turned = (Segment(SegmentKind.CHUNK, (7,)), chunks[0], replace(chunks[1], sees=(1,)))
    turned = Prompt((PROMPT.segments[0], *turned, PROMPT.segments[-1]))
    assert exact_spans(arrange(turned, "sequential")) == {0, 1}, "the last one did not see the first"


def test_a_sequential_layout_as_a_literal():
    after = repaired(arrange(PROMPT, "sequential"), {1: (), 2: (0, 2)})
    *_, repair, question = after.spans
    assert after.repair == 3 and repair.is_repair
    assert (repair.token_ids, repair.start, repair.positions, repair.end) == ((6, 8), 5, (5, 7), 8)
    assert repair.views == (View(0, 0), View(1, 0), View(2, 2, Visibility((0, 2), (0, 2))))
    assert question.views == (View(0, 0), View(1, 0), View(2, 2, Visibility((0, 2))), View(3, 0))


def test_tokens_of_several_chunks_see_different_parts():
    after = repaired(arrange(PROMPT, "shared"), {1: (1,), 2: (2,)})
    *_, repair, question = after.spans
    assert (repair.token_ids, repair.positions, repair.parts) == ((5, 8), (4, 7), (0, 1))
    assert repair.views == (View(0, 0), View(1, 0, Visibility((1,), (1, 2))), View(2, 2, Visibility((2,), (0, 2))))
    assert question.views == (
        View(0, 0),
        View(1, 0, Visibility((1,))),
        View(2, 0, Visibility((2,))),
        View(3, 0, Visibility((1,))),
        View(3, -2, Visibility((0,))),
    )


def test_without_chosen_tokens_nothing_changes():
    layout = arrange(PROMPT, "shared")
    assert repaired(layout, {1: (), 2: ()}) == layout


def test_a_layout_is_repaired_once():
    with pytest.raises(AssertionError, match="once"):
        repaired(repaired(arrange(PROMPT), {2: (0,)}), {2: (1,)})
