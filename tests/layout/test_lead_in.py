"""Lead-ins: chunks see one when they are computed, and nothing else does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvmosaic.layout import View, arrange, dense, exact_spans, repaired
from kvmosaic.prompt import Prompt

PLAIN = Prompt.from_tokens([3, 4, 5], [[20, 21, 22, 23], [40, 41]], [90, 91])
PROMPT = replace(PLAIN, lead_in=(70, 71, 72, 73, 74))


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_chunks_are_computed_behind_the_lead_in_and_read_as_if_it_were_not_there(strategy):
    layout, without = arrange(PROMPT, strategy, "lead_in"), arrange(PLAIN, strategy, "system")
    system, lead_in, one, other, question = layout.spans
    assert (lead_in.start, lead_in.token_ids, lead_in.views) == (3, (70, 71, 72, 73, 74), (View(0, 0),))
    assert [(span.start, span.views) for span in (one, other)] == [(8, (View(0, 0), View(1, 0)))] * 2
    assert [view.span for view in question.views] == [0, 2, 3]
    places = [span.start + view.distance for span, view in zip((system, one, other), question.views, strict=True)]
    assert places == list(without.positions().values()) and question.start == without.last.start
    assert layout.num_tokens == without.num_tokens and layout.is_moved


def test_nothing_but_chunks_sees_the_lead_in():
    written = dense(arrange(PROMPT, "sequential", "lead_in"))
    seen = written.mask[:, 3:8].any(1)
    assert seen.tolist() == [False] * 3 + [True] * 5 + [True] * 6 + [False] * 2


def test_a_chunk_behind_a_lead_in_is_not_exact_even_if_it_comes_first():
    assert exact_spans(arrange(PLAIN, "sequential", "system")) == {0, 1}
    layout = arrange(PROMPT, "sequential", "lead_in")
    assert exact_spans(layout) == {0}
    span = repaired(layout, {2: (0, 1), 3: (1,)}).spans[-2]
    assert (span.token_ids, span.places) == ((20, 21, 41), (3, 4, 8)) and 1 not in [view.span for view in span.views]


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_without_a_lead_in_the_context_is_the_system_text(strategy):
    assert arrange(PLAIN, strategy, "lead_in") == arrange(PLAIN, strategy, "system")
    bare = Prompt.from_tokens(question=[5])
    assert arrange(replace(bare, lead_in=(7,)), strategy, "lead_in").spans == arrange(bare, strategy, "system").spans


def test_where_nothing_moves_there_is_no_lead_in():
    segments = tuple(
        replace(segment, position_offset=50 * number) if segment.kind == "chunk" else segment
        for number, segment in enumerate(PROMPT.segments)
    )
    prompt = replace(PROMPT, segments=segments)
    assert arrange(prompt, "absolute", "lead_in") == arrange(prompt, "absolute", "system")


def test_prompts_that_differ_in_the_lead_in_alone_are_equal():
    assert PROMPT == PLAIN and hash(PROMPT) == hash(PLAIN)
