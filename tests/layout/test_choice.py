"""`auto` positions, and where the parts of a split document stand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.layout import arrange, choose_strategy, chunk_mask, dense
from kvmosaic.prompt import Prompt, Segment, SegmentKind

PROMPT = Prompt.from_tokens([1, 2, 3], [[4, 5], [6, 7, 8]], [9, 10])


@pytest.mark.parametrize(
    ("max_positions", "chosen"), [(None, "sequential"), (11, "sequential"), (10, "shared"), (4, "shared")]
)
def test_auto_is_sequential_where_the_prompt_and_one_token_of_the_answer_fit(max_positions, chosen):
    assert choose_strategy(PROMPT.num_tokens + 1, max_positions) == chosen


def test_auto_is_shared_where_keys_cannot_be_moved():
    assert choose_strategy(11, None, is_movable=False) == "shared"


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 9), st.integers(1, 9), st.integers(1, 80))
def test_what_auto_chooses_fits_whenever_any_strategy_fits(chunks, num_system, num_question, limit):
    prompt = Prompt.from_tokens(range(num_system), [range(count) for count in chunks], range(num_question))
    ends = {strategy: arrange(prompt, strategy).last.end + 1 for strategy in ("sequential", "shared")}
    chosen = choose_strategy(prompt.num_tokens + 1, limit)
    if min(ends.values()) <= limit:
        assert ends[chosen] <= limit
    assert (chosen == "sequential") == (ends["sequential"] <= limit)


@given(
    st.lists(st.integers(1, 5), max_size=4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["sequential", "shared"]),
)
def test_the_mask_by_numbers_of_chunks_is_that_of_the_prompt(chunks, num_system, num_question, strategy):
    prompt = Prompt.from_tokens(range(num_system), [range(count) for count in chunks], range(num_question))
    borders = np.cumsum([0, num_system, *chunks, num_question])
    ids = np.repeat([-1, *range(len(chunks)), -2], np.diff(borders))
    assert (chunk_mask(ids) == dense(arrange(prompt, strategy)).mask).all()
    assert (chunk_mask(ids.tolist()) == chunk_mask(ids)).all()


def split(*lengths: int) -> list[Segment]:
    """One document of neighbouring numbers as parts of these lengths."""
    parts, first = [], 100
    for number, length in enumerate(lengths, start=1):
        part = Segment(
            SegmentKind.CHUNK,
            tuple(range(first, first + length)),
            part=(number, len(lengths)),
            document_offset=first - 100,
        )
        parts.append(part)
        first += length
    return parts


def test_parts_of_a_split_document_stand_one_behind_the_other_in_shared_positions():
    other = Segment(SegmentKind.CHUNK, (50, 51))
    prompt = Prompt((PROMPT.segments[0], other, *split(4, 4, 2), PROMPT.segments[-1]))
    layout = arrange(prompt, "shared")
    assert [span.start for span in layout.spans] == [0, 3, 3, 7, 11, 13]
    assert not layout.is_moved
    assert dense(layout).is_one_forward
    seen = {view.span for span in layout.spans[2:5] for view in span.views}
    assert seen == {0}, "parts do not see each other"


@pytest.mark.parametrize("context", ["system", "none"])
def test_a_part_is_computed_at_one_place_whatever_the_strategy_and_the_documents_before_it(context):
    starts = set()
    for before in ([], [Segment(SegmentKind.CHUNK, (50, 51, 52))]):
        for strategy in ("shared", "sequential"):
            prompt = Prompt((PROMPT.segments[0], *before, *split(4, 4), PROMPT.segments[-1]))
            starts.add(arrange(prompt, strategy, context).spans[-2].start)
    assert starts == {4 + (3 if context == "system" else 0)}


def test_the_first_part_of_the_next_document_begins_anew():
    prompt = Prompt((PROMPT.segments[0], *split(4, 4), *split(3, 3), PROMPT.segments[-1]))
    assert [span.start for span in arrange(prompt, "shared").spans] == [0, 3, 7, 3, 6, 11]
    whole = replace(
        prompt, segments=tuple(replace(segment, part=None, document_offset=0) for segment in prompt.segments)
    )
    assert [span.start for span in arrange(whole, "shared").spans] == [0, 3, 3, 3, 3, 7]


def test_a_part_alone_is_computed_where_it_stands_in_its_document():
    """As documents are warmed: part by part."""
    *_, last = split(4, 4)
    assert arrange(Prompt((PROMPT.segments[0], last, PROMPT.segments[-1])), "shared").spans[1].start == 7
