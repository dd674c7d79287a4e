"""Models that read the best keys only: cold == warm == one dense forward, whatever is chosen from which parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, answer, build_engine, dense_logits, evict_all, set_tier, token_ids
from support.families import FAMILIES, build
from support.loaded import loaded_family, random_prompt
from support.parity import check_cold_and_warm, prompts, settings_of_a_run
from support.tiers import TroubledTier

from kvmosaic.attention.step import best_keys
from kvmosaic.engine import Engine
from kvmosaic.errors import InvalidRepair, NotMovable
from kvmosaic.layers import AttentionCall
from kvmosaic.layout import arrange
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, Segment, SegmentKind
from kvmosaic.sampling import SamplingParams

INDEXED = [name for name, family in FAMILIES.items() if "index_topk" in family.settings and not family.is_refused]
ONE = "glm_moe_dsa"
"""Half of its layers read what the layer before has chosen."""


@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0, -torch.inf]), min_size=7, max_size=7), min_size=1))
def test_of_equal_keys_the_first_are_chosen_and_hidden_ones_never(rows):
    scores = torch.tensor(rows)
    for count in range(1, 9):
        for row, chosen in zip(scores.tolist(), best_keys(scores, count).tolist(), strict=True):
            order = sorted((key for key in range(7) if row[key] > -torch.inf), key=lambda key, row=row: -row[key])
            assert [key for key in range(7) if chosen[key]] == sorted(order[:count])


@pytest.mark.slow
@pytest.mark.parametrize("family", INDEXED)
@settings(max_examples=10)
@given(prompt=prompts(), **settings_of_a_run)
def test_random_prompts_equal_the_dense_forward_cold_and_warm(family, prompt, **run):
    check_cold_and_warm(loaded_family(family), prompt, **run)


@pytest.mark.parametrize("strategy", ["sequential", pytest.param("shared", marks=pytest.mark.slow)])
@pytest.mark.parametrize("block_size", [3, pytest.param(16, marks=pytest.mark.slow)])
def test_a_prompt_in_small_steps_equals_the_dense_forward_cold_and_warm(strategy, block_size):
    check_cold_and_warm(loaded_family(ONE), random_prompt(1), strategy, "none", block_size, 7, True)


@pytest.mark.slow
def test_equal_scores_are_chosen_by_position_in_any_parts():
    model = LoadedModel.from_module(build(ONE, index_n_heads=1))  # half of all scores are 0
    for budget in (5, 256):
        check_cold_and_warm(model, random_prompt(2), "sequential", "none", 4, budget, False)


def test_a_document_that_is_left_out_is_as_if_it_had_never_been_there():
    model, prompt = loaded_family(ONE), random_prompt(3)
    rest = Prompt((*prompt.segments[:2], *prompt.segments[3:]))
    engine = build_engine(model)
    answer(engine, prompt)
    _, known = answer(engine, rest)
    _, fresh = answer(build_engine(model), rest)
    assert (known - fresh).abs().max() <= 1e-12


def test_a_prompt_of_fewer_tokens_than_are_chosen_reads_all_of_them_by_plain_attention():
    model, calls = LoadedModel.from_module(build(ONE, index_topk=64)), []
    engine = build_engine(model)
    forward = engine.runner._forward

    def watched(batch, receiver, mixer=None):
        def record(call: AttentionCall):
            calls.append(call)
            return receiver(call)

        return forward(batch, record, mixer)

    engine.runner._forward = watched
    answer(engine, random_prompt())
    assert len(calls) > len(model.layers)
    assert not any(call.chosen.masks for call in calls if not call.num_chosen)


@pytest.mark.slow
@pytest.mark.parametrize("family", INDEXED)
def test_plain_prompts_give_the_tokens_of_transformers_generate(family):
    model = loaded_family(family)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 128, (length,), generator=generator) for length in (1, 5, 23, 40)]
    params = SamplingParams(temperature=0, max_tokens=9, min_tokens=9)
    engine = build_engine(model, max_batched_tokens=16)
    before = model.module.config._attn_implementation
    model.module.set_attn_implementation("eager")
    expected = [
        model.module.generate(text[None], do_sample=False, max_new_tokens=9, min_new_tokens=9)[0, len(text) :].tolist()
        for text in texts
    ]
    model.module.set_attn_implementation(before)
    for _ in range(2):
        requests = [engine.add_request(Prompt.plain(text.tolist()), params) for text in texts]
        assert [token_ids(request) for request in engine.run(requests)] == expected, "together, in parts, cached"


@pytest.mark.slow
def test_answers_that_fork_and_are_preempted_are_those_of_a_quiet_engine():
    model, params = loaded_family(ONE), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, n=2)
    first = random_prompt().segments[:-1]
    ends = [Segment(SegmentKind.QUESTION, (90 + number, 91)) for number in range(4)]
    questions = [Prompt((*first, end)) for end in ends]

    def answers(engine: Engine, *asked: Prompt) -> list[list[int]]:
        requests = engine.run([engine.add_request(question, params) for question in asked])
        engine.check_invariants()
        return [list(each.token_ids) for request in requests for each in request.output().outputs]

    quiet = build_engine(model)
    expected = [tokens for question in questions for tokens in answers(quiet, question)]
    crowded = build_engine(model, blocks=(17, 40), max_batched_tokens=16)
    assert answers(crowded, *questions) == expected
    assert sum(crowded.scheduler.preemption.counts.values()) > 0


def test_index_keys_come_back_from_sleep_and_from_a_tier():
    model, prompt, tier = loaded_family(ONE), random_prompt(4), TroubledTier()
    engine = build_engine(model)
    offloader = set_tier(engine, tier)
    cold, expected = answer(engine, prompt)
    engine.sleep(1)
    while engine.has_work:
        engine.step()
    engine.wake()
    _, awake = answer(engine, prompt)
    assert offloader.tiered_store.flush(60)
    evict_all(engine)
    request, loaded = answer(engine, prompt)
    assert tier.count("get") and all(segment.computed_tokens == 0 for segment in request.reuse.segments[1:-1])
    for logits in (awake, loaded):
        assert (logits - expected).abs().max() <= 1e-12
    assert (expected - dense_logits(model, arrange(prompt), token_ids(cold))).abs().max() <= 1e-10


def test_a_repair_that_measures_attention_is_refused():
    with pytest.raises(InvalidRepair, match="reads the best keys only, which it chooses before"):
        build_engine(loaded_family(ONE)).add_request(random_prompt(), replace(GREEDY, repair="query(0.2)"))


def test_a_rolling_window_is_refused():
    with pytest.raises(NotMovable, match="this model chooses the keys that it reads"):
        build_engine(loaded_family(ONE)).add_request(random_prompt(), replace(GREEDY, sink_tokens=2, window_tokens=8))


@pytest.mark.parametrize("strategy", ["shared", pytest.param("sequential", marks=pytest.mark.slow)])
def test_first_tokens_computed_again_equal_the_dense_forward(strategy):
    engine = build_engine(loaded_family(ONE), position_strategy=strategy)
    for _ in range(2):
        request, logits = answer(engine, random_prompt(5), replace(GREEDY, repair="first(3)"))
        expected = dense_logits(engine.runner.model, request.layout, token_ids(request))
        assert (logits - expected).abs().max() <= 1e-10
