"""What is measured before anything is chosen: the same as obvious twins measure, in whatever parts and order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from support.engines import GREEDY, build_engine, fragment
from support.families import build
from support.parity import prompts, settings_of_a_run
from support.watching import Spy, attention_shares, key_deviations

from kvmosaic.layout import arrange, exact_spans
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import SegmentKind

ATTENTION = ("llama", "gemma3", "gemma2", "gpt_oss", "deepseek_v3")
"""Full attention; windows; windows and a soft cap; windows and sinks; latents."""
DEVIATION = ("llama", "qwen3", "gemma3", "deepseek_v3")
SYSTEM, QUESTION = [3, 4, 5], [7, 8, 9, 10]
DOCUMENTS = [list(range(20, 33)), list(range(40, 49)), list(range(60, 75))]


@cache
def loaded(family: str, dtype: torch.dtype = torch.float64) -> LoadedModel:
    return LoadedModel.from_module(build(family, dtype))


@cache
def plain(family: str):
    return build(family, attn_implementation="eager")


def measured(engine, prompt, **signals):
    """What a policy is told of the chunks of a prompt."""
    spy = Spy(**signals)
    request = engine.add_request(prompt, replace(GREEDY, repair=spy))
    engine.run([request])
    engine.check_invariants()
    return spy.seen[-1]


def check_signals(chunks, layout, shares, deviations, tolerance=1e-10):
    """Compares with the twins, by span."""
    exact = exact_spans(layout)
    indexes = [index for index, span in enumerate(layout.spans) if span.segment.kind is SegmentKind.CHUNK]
    assert [chunk.num_tokens for chunk in chunks] == [layout.spans[index].num_tokens for index in indexes]
    assert [chunk.is_exact for chunk in chunks] == [index in exact for index in indexes]
    for index, chunk in zip(indexes, chunks, strict=True):
        if shares is not None:
            check_close(chunk.attention, shares[index], tolerance)
        if deviations is not None:
            check_close(chunk.deviation, deviations[index] * (not chunk.is_exact), tolerance)


def check_close(found, expected, tolerance):
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected.double(), atol=tolerance, rtol=0)


def open_prompts():
    """Prompts of which something may be measured."""
    return prompts().filter(lambda prompt: len(prompt.chunks) > 1)


@pytest.mark.parametrize("family", ATTENTION)
@settings(max_examples=4)
@given(prompt=open_prompts(), **settings_of_a_run)
def test_attention_is_that_of_a_dense_forward(family, prompt, strategy, context, block_size, budget, fragmented):
    model, layout = loaded(family), arrange(prompt, strategy, context)
    engine = build_engine(
        model,
        blocks=(900, 700),
        max_batched_tokens=budget,
        block_size=block_size,
        position_strategy=strategy,
        chunk_context=context,
    )
    if fragmented:
        fragment(engine)
    shares = attention_shares(model, layout)
    for _ in range(2):  # the second time, question and chunks are cached
        check_signals(measured(engine, prompt, signals=frozenset({"attention"})), layout, shares, None)


@pytest.mark.parametrize("family", DEVIATION)
@settings(max_examples=4)
@given(prompt=open_prompts(), **settings_of_a_run)
def test_deviation_is_that_of_an_ordinary_forward(family, prompt, strategy, context, block_size, budget, fragmented):
    layout = arrange(prompt, strategy, context)
    engine = build_engine(
        loaded(family),
        blocks=(900, 700),
        max_batched_tokens=budget,
        block_size=block_size,
        position_strategy=strategy,
        chunk_context=context,
    )
    if fragmented:
        fragment(engine)
    deviations = key_deviations(plain(family), layout)
    check_signals(measured(engine, prompt, signals=frozenset({"deviation"})), layout, None, deviations)
