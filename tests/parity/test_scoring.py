"""What scoring promises: one forward over a given continuation == deciding for its tokens one by one == dense."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, RecordingRunner, answer, build_engine, dense_logits, token_ids
from support.families import build
from support.parity import engine_of_a_run, prompts, settings_of_a_run, tolerance_of

from kvmosaic.engine import Engine, Request
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

FAMILIES = ("llama", "gemma3", "deepseek_v3", "gpt_oss")
"""Full attention; windows with two rotations; latent attention; windows with sinks."""
POLICIES = (None, "first(3)", "deviation(0.3)", "query(0.3)", "combined(0.4)", "full")
CONTINUATIONS = st.lists(st.integers(3, 99), min_size=1, max_size=9)


@cache
def loaded(family: str, dtype: torch.dtype = torch.float64) -> LoadedModel:
    return LoadedModel.from_module(build(family, dtype))


class Forcing(RecordingRunner):
    """A runner whose answers are given: it keeps the logits, and hands on that only the next given token is likely."""

    forced: list[int]

    def run(self, spans):
        logits = super().run(spans)
        if not len(logits):
            return logits
        only = torch.full_like(logits, -1e9)
        only[:, self.forced.pop(0)] = 0.0
        return only


def scored(engine: Engine, prompt: Prompt, continuation: list[int], repair: str | None) -> Request:
    request = engine.add_score(prompt, continuation, repair=repair, keeps_distributions=True)
    while engine.has_unfinished_requests:
        engine.step()
        engine.check_invariants()
    if request.error is not None:
        raise request.error
    return request


def with_repair(repair):
    return replace(GREEDY, repair=repair)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12)
@given(prompt=prompts(), continuation=CONTINUATIONS, repair=st.sampled_from(POLICIES), **settings_of_a_run)
def test_scores_equal_the_dense_forward_in_float64(
    family, prompt, continuation, repair, strategy, context, block_size, budget, fragmented
):
    model = loaded(family)
    engine = engine_of_a_run(model, strategy, context, block_size, budget, fragmented, blocks=(900, 700))
    ordinary, _ = answer(engine, prompt, with_repair(repair))
    expected = dense_logits(model, ordinary.layout, continuation).log_softmax(-1)
    for _ in range(2):
        scoring = scored(engine, prompt, continuation, repair).scoring
        torch.testing.assert_close(scoring.distributions, expected, atol=tolerance_of(expected, model.dtype), rtol=0)
        assert scoring.output().logprobs == pytest.approx(
            [float(row[token]) for row, token in zip(expected, continuation, strict=True)], abs=1e-9
        )


@pytest.mark.parametrize(
    ("family", "repair"),
    [
        pytest.param(family, repair, marks=pytest.mark.slow if number and place else ())
        for number, family in enumerate(FAMILIES)
        for place, repair in enumerate(POLICIES)
    ],
)
def test_scores_equal_those_of_forced_tokens_one_by_one(family, repair):
    prompt = Prompt.from_tokens([3, 4, 5], [list(range(20, 33)), list(range(40, 49)), list(range(60, 75))], [90, 91])
    continuation = [7, 60, 61, 8, 95, 3]
    engine = build_engine(loaded(family), runner=Forcing)
    engine.runner.forced = list(continuation)
    params = replace(GREEDY, repair=repair, max_tokens=len(continuation))
    request, logits = answer(engine, prompt, params)
    assert token_ids(request) == continuation
    engine = build_engine(loaded(family))
    found = scored(engine, prompt, continuation, repair)
    torch.testing.assert_close(found.scoring.distributions, logits.log_softmax(-1), atol=1e-10, rtol=0)
    if request.reuse.repair is not None:
        assert found.reuse.repair.repaired_tokens == request.reuse.repair.repaired_tokens
    assert found.scoring.greedy_token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("repair", [None, "query(0.3)"])
def test_what_a_score_leaves_in_the_cache_is_what_an_answer_finds(repair):
    prompt = Prompt.from_tokens([3, 4, 5], [list(range(20, 33)), list(range(40, 49))], [90, 91, 92])
    engine = build_engine(loaded("llama"))
    own, _ = answer(build_engine(loaded("llama")), prompt, with_repair(repair))
    scored(engine, prompt, [*token_ids(own), 50, 51, 52, 53], repair)
    request, logits = answer(engine, prompt, with_repair(repair))
    assert token_ids(request) == token_ids(own)
    expected = dense_logits(loaded("llama"), request.layout, token_ids(request))
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
