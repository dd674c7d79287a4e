"""What is measured before anything is chosen: the same as obvious twins measure, in whatever parts and order."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from support.engines import GREEDY, build_engine
from support.families import build
from support.parity import engine_of_a_run, prompts, settings_of_a_run
from support.watching import Spy, attention_shares, key_deviations

from kvmosaic.attention import TorchBackend
from kvmosaic.attention.native import LIBRARY, NativeBackend
from kvmosaic.layout import arrange, exact_spans
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, SegmentKind

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
    engine = engine_of_a_run(model, strategy, context, block_size, budget, fragmented, blocks=(900, 700))
    shares = attention_shares(model, layout)
    for _ in range(2):  # the second time, question and chunks are cached
        check_signals(measured(engine, prompt, signals=frozenset({"attention"})), layout, shares, None)


@pytest.mark.parametrize("family", DEVIATION)
@settings(max_examples=4)
@given(prompt=open_prompts(), **settings_of_a_run)
def test_deviation_is_that_of_an_ordinary_forward(family, prompt, strategy, context, block_size, budget, fragmented):
    layout = arrange(prompt, strategy, context)
    engine = engine_of_a_run(loaded(family), strategy, context, block_size, budget, fragmented, blocks=(900, 700))
    deviations = key_deviations(plain(family), layout)
    check_signals(measured(engine, prompt, signals=frozenset({"deviation"})), layout, None, deviations)


def twins(family, prompt, strategy, context="system"):
    layout = arrange(prompt, strategy, context)
    return layout, attention_shares(loaded(family), layout), key_deviations(plain(family), layout)


@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_a_document_that_stands_twice_in_a_prompt_gets_in_each_place_what_it_gets_there(strategy):
    prompt = Prompt.from_tokens(SYSTEM, [DOCUMENTS[1], DOCUMENTS[0], DOCUMENTS[1]], QUESTION)
    engine = build_engine(loaded("llama"), position_strategy=strategy)
    check_signals(measured(engine, prompt), *twins("llama", prompt, strategy))


def test_requests_that_measure_in_the_same_steps_are_told_of_their_own_questions():
    first = Prompt.from_tokens(SYSTEM, DOCUMENTS, QUESTION)
    second = Prompt.from_tokens(SYSTEM, DOCUMENTS[::-1], [11, 12, 13])
    engine, spies = build_engine(loaded("llama"), max_batched_tokens=7), (Spy(), Spy())
    requests = [
        engine.add_request(prompt, replace(GREEDY, repair=spy))
        for prompt, spy in zip((first, second), spies, strict=True)
    ]
    engine.run(requests)
    for prompt, spy in zip((first, second), spies, strict=True):
        check_signals(spy.seen[-1], *twins("llama", prompt, "shared"))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_who_gives_way_while_it_measures_measures_again(preemption, prefix_caching):
    prompt = Prompt.from_tokens(SYSTEM, DOCUMENTS, [*QUESTION, *range(90, 110)])
    num_tokens = sum(segment.num_tokens for segment in prompt.segments)
    engine = build_engine(
        loaded("llama"),
        max_batched_tokens=5,
        prefix_caching=prefix_caching,
        engine_options={"preemption": preemption, "swap_space": "1MiB"},
    )
    spy = Spy()
    engine.add_request(prompt, replace(GREEDY, repair=spy))
    for number in range(2 + num_tokens // 5):
        engine.step()
        (sequence,) = engine.scheduler.running
        asked = sequence.allocation.last
        if number % 2 and 0 < asked.num_computed < asked.num_tokens and engine.scheduler.num_preemptions < 2:
            engine.scheduler.preempt(sequence)
            # its chunks lie elsewhere when it comes back
            engine.kv_cache.reset()
            taken = engine.kv_cache.chunk_pool.allocate(3)
            engine.step()
            engine.kv_cache.chunk_pool.release(taken)
            break
    assert engine.scheduler.num_preemptions == 1
    engine.run(engine.unfinished_requests)
    engine.check_invariants()
    check_signals(spy.seen[-1], *twins("llama", prompt, "shared"))


BACKENDS = [TorchBackend(), *([NativeBackend()] if LIBRARY.exists() else [])]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: type(backend).__name__)
def test_other_backends_and_precisions_measure_the_same_to_rounding(backend):
    prompt = Prompt.from_tokens(SYSTEM, DOCUMENTS, QUESTION)
    _, shares, deviations = twins("llama", prompt, "sequential")
    engine = build_engine(loaded("llama", torch.float32), backend=backend, position_strategy="sequential")
    check_signals(measured(engine, prompt), arrange(prompt, "sequential"), shares, deviations, 1e-4)


def test_a_long_question_over_a_long_chunk_is_measured_in_parts(monkeypatch):
    monkeypatch.setattr("kvmosaic.attention.step._MAX_SCORES", 100)
    prompt = Prompt.from_tokens(SYSTEM, DOCUMENTS, QUESTION)
    check_signals(measured(build_engine(loaded("gemma3")), prompt), *twins("gemma3", prompt, "shared"))


def test_no_forward_of_measuring_is_larger_than_a_step_may_be():
    prompt = Prompt.from_tokens(SYSTEM, [list(range(3, 60)), list(range(60, 120))], QUESTION)
    engine, sizes = build_engine(loaded("llama"), max_batched_tokens=16), []
    module = engine.runner.model.module
    handle = module.register_forward_pre_hook(
        lambda _, __, named: sizes.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        measured(engine, prompt)
    finally:
        handle.remove()
    assert max(sizes) == 16
