"""Texts before and between documents, and preambles: cached == computed == dense, and what is found again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, answer, build_engine, dense_logits, token_ids
from support.families import build
from support.parity import prompts, settings_of_a_run

from kvmosaic.layout import arrange, dense
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, Segment, SegmentKind

MODEL = LoadedModel.from_module(build("llama", torch.float64))
DOCUMENTS = [list(range(20, 33)), list(range(40, 49)), list(range(60, 75))]


def prompt_with_rest(rest: list[int], *order: int, glue: tuple[int, ...] = ()) -> Prompt:
    system, *chunks, question = Prompt.from_tokens([2, 3, 4, 5, 6], [DOCUMENTS[i] for i in order], [9, 8, 7]).segments
    between = [Segment(SegmentKind.TEXT, glue)] if glue else []
    body = [segment for chunk in chunks for segment in (*between, chunk)]
    return Prompt((system, Segment(SegmentKind.TEXT, tuple(rest)), *body, question))


@given(prompts(), settings_of_a_run["strategy"], settings_of_a_run["context"])
def test_texts_see_everything_before_them_and_documents_see_no_text(prompt, strategy, context):
    layout = arrange(prompt, strategy, context)
    mask, start = dense(layout).mask, 0
    kinds = [span.segment.kind for span in layout.spans for _ in range(span.num_tokens)]
    for span in layout.spans:
        row = mask[start]
        if span.segment.kind in (SegmentKind.TEXT, SegmentKind.QUESTION):
            assert row[: start + 1].all() and not row[start + 1 :].any()
        elif span.segment.kind is SegmentKind.CHUNK:
            seen = {kinds[column] for column in range(start) if row[column]}
            assert seen <= {SegmentKind.SYSTEM} and (context == "none" or ("system" in kinds) == bool(seen))
        start += span.num_tokens


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
@pytest.mark.parametrize("glue", [(), (50, 51)])
def test_documents_are_found_under_another_rest_and_equal_the_dense_forward(strategy, glue):
    engine = build_engine(MODEL, position_strategy=strategy)
    for number, (rest, order) in enumerate([([10, 11], (0, 1, 2)), ([12, 13, 14, 15], (2, 0, 1)), ([16], (1, 2))]):
        prompt = prompt_with_rest(rest, *order, glue=glue)
        request, logits = answer(engine, prompt)
        expected = dense_logits(MODEL, arrange(prompt, strategy), token_ids(request))
        torch.testing.assert_close(logits.to(expected.dtype), expected, atol=1e-10, rtol=0)
        kinds = [segment.kind for segment in request.reuse.segments]
        chunks = [segment for segment in request.reuse.segments if segment.kind == "chunk"]
        assert all(chunk.reused_tokens == (chunk.num_tokens if number else 0) for chunk in chunks)
        assert kinds[:2] == ["system", "text"]
        assert f"documents saw 5 of {5 + len(rest) + len(glue)} tokens before them" in request.reuse.composition
    engine.check_invariants()


def test_a_rest_that_comes_again_is_reused_as_well():
    engine = build_engine(MODEL, position_strategy="sequential", block_size=4)
    rest = list(range(80, 92))
    for _ in range(2):
        request, _ = answer(engine, prompt_with_rest(rest, 0, 1))
    assert all(segment.reused_tokens == segment.num_tokens for segment in request.reuse.segments[:-1])


@settings(max_examples=10)
@given(prompt=prompts().filter(lambda prompt: len(prompt.chunks) > 1), strategy=settings_of_a_run["strategy"])
def test_warming_a_prompt_computes_its_documents_and_none_of_its_texts(prompt, strategy):
    engine = build_engine(MODEL, position_strategy=strategy, blocks=(900, 700))
    engine.run([engine.add_warm_up(prompt)])
    request = engine.add_request(prompt, GREEDY)
    engine.run([request])
    chunks = [segment for segment in request.reuse.segments if segment.kind == "chunk"]
    assert all(chunk.reused_tokens == chunk.num_tokens for chunk in chunks)
    engine.check_invariants()


@settings(max_examples=10)
@given(prompt=prompts(), tokens=st.lists(st.integers(1, 120), min_size=1, max_size=9))
def test_sequential_positions_are_those_of_the_joined_prompt(prompt, tokens):
    first = prompt.segments[0].kind is SegmentKind.SYSTEM
    segments = list(prompt.segments)
    segments.insert(int(first), Segment(SegmentKind.TEXT, tuple(tokens)))
    layout = arrange(replace(prompt, segments=tuple(segments)), "sequential")
    assert dense(layout).question_positions.tolist() == list(range(layout.num_tokens))
