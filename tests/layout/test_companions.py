"""Companions: chunks see them when they are computed, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmosaic.layout import View, arrange, dense, exact_spans, repaired
from kvmosaic.prompt import Prompt

PLAIN = Prompt.from_tokens([3, 4, 5], [[20, 21, 22, 23], [40, 41]], [90, 91])
PROMPT = replace(PLAIN, companions=((70, 71, 72, 73, 74),))


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_later_chunks_are_computed_after_companions_and_read_as_if_it_were_not_there(strategy):
    layout, without = arrange(PROMPT, strategy, "companions"), arrange(PLAIN, strategy, "system")
    system, companions, one, other, question = layout.spans
    assert (companions.start, companions.token_ids, companions.views) == (3, (70, 71, 72, 73, 74), (View(0, 0),))
    assert (one.start, one.views) == (3, (View(0, 0),))
    assert (other.start, other.views) == (8, (View(0, 0), View(1, 0)))
    assert [view.span for view in question.views] == [0, 2, 3]
    places = [span.start + view.distance for span, view in zip((system, one, other), question.views, strict=True)]
    assert places == list(without.positions().values()) and question.start == without.last.start
    assert layout.num_tokens == without.num_tokens and layout.is_moved


def test_each_document_is_computed_behind_as_many_texts_as_there_are_documents_before_it():
    prompt = replace(Prompt.from_tokens([3, 4], [[20], [30], [40], [50]], [90]), companions=((70, 71), (72,)))
    _, first, second, *chunks, question = arrange(prompt, "sequential", "companions").spans
    assert (first.start, second.start) == (2, 4) and second.views == (View(0, 0), View(1, 0))
    assert [chunk.start for chunk in chunks] == [2, 4, 5, 5]
    assert [len(chunk.views) for chunk in chunks] == [1, 2, 3, 3]
    assert [view.distance for view in question.views] == [0, 0, -1, -1, 0], "read one after the other"
    assert not arrange(replace(prompt, companions=()), "sequential", "companions").spans[1].is_companion


def test_nothing_but_later_chunks_sees_companions():
    written = dense(arrange(PROMPT, "sequential", "companions"))
    seen = written.mask[:, 3:8].any(1)
    assert seen.tolist() == [False] * 3 + [True] * 5 + [False] * 4 + [True] * 2 + [False] * 2


def test_the_first_chunk_is_exact_and_later_ones_are_not():
    layout = arrange(PROMPT, "sequential", "companions")
    assert exact_spans(layout) == {0, 2}
    span = repaired(layout, {3: (1,)}).spans[-2]
    assert (span.token_ids, span.positions) == ((41,), (8,)) and 1 not in [view.span for view in span.views]


def test_a_prompt_with_one_chunk_has_no_companions():
    alone = replace(Prompt.from_tokens([3, 4], [[20, 21]], [90]), companions=((70, 71),))
    assert arrange(alone, "sequential", "companions").spans == arrange(alone, "sequential", "system").spans


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_without_companions_the_context_is_the_system_text(strategy):
    assert arrange(PLAIN, strategy, "companions") == arrange(PLAIN, strategy, "system")
    bare = Prompt.from_tokens(question=[5])
    assert (
        arrange(replace(bare, companions=((7,),)), strategy, "companions").spans
        == arrange(bare, strategy, "system").spans
    )


def test_where_nothing_moves_there_are_no_companions():
    segments = tuple(
        replace(segment, position_offset=50 * number) if segment.kind == "chunk" else segment
        for number, segment in enumerate(PROMPT.segments)
    )
    prompt = replace(PROMPT, segments=segments)
    assert arrange(prompt, "absolute", "companions") == arrange(prompt, "absolute", "system")


def test_prompts_that_differ_in_companions_alone_are_equal():
    assert PROMPT == PLAIN and hash(PROMPT) == hash(PLAIN)


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_parts_of_a_split_document_stand_one_behind_the_other_whatever_they_saw(strategy):
    whole = Prompt.from_tokens([3, 4, 5], [[20, 21, 22, 23], [24, 25], [40, 41], [42, 43, 44]], [90, 91])
    offsets = (0, 0, 4, 0, 2, 0)
    segments = tuple(
        replace(segment, part=(2 - number % 2, 2), document_offset=offset) if segment.kind == "chunk" else segment
        for number, (segment, offset) in enumerate(zip(whole.segments, offsets, strict=True))
    )
    prompt = replace(whole, segments=segments)
    layout = arrange(replace(prompt, companions=((70, 71, 72, 73, 74),)), strategy, "companions")
    expected = arrange(prompt, strategy, "system")
    places = [place for index, place in layout.positions().items() if index]
    assert places == [place for index, place in expected.positions().items() if index]
    assert layout.last.start == expected.last.start
    # all parts of the first document stand right after the system text
    assert [span.start for span in layout.spans[2:-1]] == [3, 7, 8, 10]


def test_a_document_never_sees_itself():
    prompt = replace(Prompt.from_tokens([3, 4], [[20], [30], [40], [72]], [90]), companions=((70, 71), (72,), (73,)))
    layout = arrange(prompt, "sequential", "companions")
    assert [len(span.views) for span in layout.spans if span.is_chunk] == [1, 2, 3, 2]


@pytest.mark.parametrize("place", range(5))
def test_a_single_is_computed_as_at_its_place_in_a_prompt(place):
    documents = [[20], [30], [40], [50], [60, 61]]
    prompt = replace(Prompt.from_tokens([3, 4], documents, [90]), companions=((70, 71), (72,), (73,)))
    layout = arrange(prompt, "sequential", "companions")
    expected = [span for span in layout.spans if span.is_chunk][place]
    singles = [single for single in prompt.singles(with_places=True) if single.place == min(place, 3)]
    (chunk,) = (span for span in arrange(singles[place], "sequential", "companions").spans if span.is_chunk)
    assert (chunk.start, chunk.views, chunk.token_ids) == (expected.start, expected.views, expected.token_ids)
    assert len(prompt.singles(with_places=True)) == 4 * len(prompt.singles()) == 20
