"""What companions promise: the engine == one dense forward in which chunks, and nothing else, see them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, answer, build_engine, dense_logits, token_ids
from support.families import build
from support.loaded import chatting_llama
from support.parity import engine_of_a_run, prompts, settings_of_a_run, tolerance_of

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig
from kvmosaic.config import TierConfig
from kvmosaic.layout import arrange
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

FAMILIES = ("llama", "gemma3", "deepseek_v3", "gpt_oss")
TEXTS = st.lists(st.integers(3, 99), min_size=1, max_size=9).map(tuple)
COMPANIONS = st.lists(TEXTS, min_size=1, max_size=3).map(tuple)
RUN = {name: each for name, each in settings_of_a_run.items() if name != "context"}
SYSTEM, QUESTION = [3, 4, 5], [90, 91, 92]
DOCUMENTS = [list(range(20, 33)), list(range(40, 49)), list(range(60, 75))]
PROMPT = replace(Prompt.from_tokens(SYSTEM, DOCUMENTS, QUESTION), companions=((70, 71, 72, 73, 74),))


@cache
def loaded(family: str) -> LoadedModel:
    return LoadedModel.from_module(build(family, torch.float64))


def check(engine, prompt, repair=None):
    request, logits = answer(engine, prompt, replace(GREEDY, repair=repair))
    expected = dense_logits(engine.runner.model, request.layout, token_ids(request))
    torch.testing.assert_close(logits, expected, atol=tolerance_of(expected, torch.float64), rtol=0)
    return request


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=12)
@given(prompt=prompts(), companions=COMPANIONS, repair=st.sampled_from([None, "first(3)", "query(0.3)", "full"]), **RUN)
def test_answers_from_documents_with_companions_equal_the_dense_forward(
    family, prompt, companions, repair, strategy, block_size, budget, fragmented
):
    prompt = replace(prompt, companions=companions)
    engine = engine_of_a_run(loaded(family), strategy, "companions", block_size, budget, fragmented, blocks=(900, 700))
    for _ in range(2):
        check(engine, prompt, repair)


@pytest.mark.parametrize("repair", [None, "query(0.3)"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_companions_are_computed_only_while_a_chunk_is_missing(repair, prefix_caching):
    engine = build_engine(
        loaded("llama"), chunk_context="companions", position_strategy="sequential", prefix_caching=prefix_caching
    )
    check(engine, PROMPT, repair)
    known = len(engine.runner.logits), engine.kv_cache.statistics()
    plan = engine.kv_cache.plan(arrange(PROMPT, "sequential", "companions"))
    assert [span.num_tokens for span in plan.spans if span.kind == "companion"] == [0] and known
    request = check(engine, PROMPT, repair)
    assert "documents after the first were computed after companions" in request.reuse.composition
    assert [segment.kind for segment in request.reuse.segments] == ["system", "chunk", "chunk", "chunk", "question"]
    assert all(segment.reused_tokens for segment in request.reuse.segments[1:4])
    more = Prompt.from_tokens(SYSTEM, [*DOCUMENTS, [5, 6, 7]], QUESTION)
    check(engine, replace(more, companions=PROMPT.companions), repair)


def test_of_several_texts_only_those_are_computed_that_a_missing_chunk_sees():
    engine = build_engine(loaded("llama"), chunk_context="companions", position_strategy="sequential")
    prompt = replace(PROMPT, companions=((70, 71), (72, 73, 74), (75, 76)))
    check(engine, prompt)
    turned = replace(Prompt.from_tokens(SYSTEM, DOCUMENTS[::-1], QUESTION), companions=prompt.companions)
    plan = engine.kv_cache.plan(arrange(turned, "sequential", "companions"))
    actions = [(span.kind, span.action) for span in plan.spans if span.kind == "chunk"]
    assert actions == [("chunk", "compute"), ("chunk", "reuse"), ("chunk", "compute")], "a copy serves its place"
    one = engine.kv_cache.plan(
        arrange(replace(turned, segments=turned.segments[:3] + turned.segments[-1:]), "sequential", "companions")
    )
    assert [span.num_tokens for span in one.spans if span.kind == "companion"] == [0], (
        "no text for a copy that is there"
    )
    check(engine, turned)


def test_a_chunk_evicted_between_plan_and_allocation_is_computed_after_companions():
    engine = build_engine(loaded("llama"), chunk_context="companions", position_strategy="sequential")
    check(engine, PROMPT)
    layout = arrange(PROMPT, "sequential", "companions")
    plan = engine.kv_cache.plan(layout)
    (*_, chunk) = engine.kv_cache.chunks()
    engine.kv_cache.delete(chunk.key)
    allocation = engine.kv_cache.allocate(plan)
    assert allocation.spans[1].num_tokens == len(PROMPT.companions[0])
    engine.kv_cache.release(allocation)
    engine.check_invariants()
    check(engine, PROMPT)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_chunks_of_many_prompts_are_evicted_and_computed_again_behind_it(prefix_caching):
    engine = build_engine(
        loaded("llama"),
        chunk_context="companions",
        blocks=(40, 9),
        prefix_caching=prefix_caching,
        max_batched_tokens=16,
    )
    for number in (0, 1, 2, 0, 1, 2):
        two = [DOCUMENTS[number], DOCUMENTS[number - 1]]
        check(engine, replace(Prompt.from_tokens(SYSTEM, two, QUESTION), companions=PROMPT.companions))
    assert engine.kv_cache.statistics().evictions > 0


def test_companions_that_have_no_room_are_left_out():
    engine = build_engine(loaded("llama"), chunk_context="companions", engine_options={"max_model_len": 34})
    prompt = replace(Prompt.from_tokens(SYSTEM, DOCUMENTS[:2], QUESTION), companions=(PROMPT.companions[0] * 5,))
    request = check(engine, prompt)
    assert "companions" not in request.reuse.composition


def test_documents_are_kept_in_tiers_as_they_were_computed(tmp_path):
    config = ChunkCacheConfig(chunk_cache_size="1MiB", chunk_context="companions", companions=("The sea is wide.",))
    tiers = TierConfig(chunk_tier=(f"file://{tmp_path / 'tier'}",), chunk_loading="always")
    documents = ["The ferry goes to Oak Island.", "The mill grinds oats."]
    answers = []
    for _ in range(2):
        with LLM(
            chatting_llama(),
            chunk_cache_config=config,
            engine_config=EngineConfig(request_cache_size="4MiB"),
            tier_config=tiers,
        ) as llm:
            prompt = llm.compose([{"role": "user", "content": "Where?"}], documents=documents)
            assert "sea is wide" in llm.model.tokenizer.decode(prompt.companions[0])
            (output,) = llm.generate(prompt, GREEDY)
            answers.append((output.outputs[0].token_ids, [segment.tier for segment in output.reuse.segments]))
    (cold, _), (warm, places) = answers
    assert cold == warm and places[1:3] == ["object", "object"]


@pytest.mark.slow
@settings(max_examples=8)
@given(
    asked=st.lists(st.tuples(st.permutations(range(3)), st.sampled_from([(0, 1), (2, 0), (0,), (3, 4, 0)])), min_size=2)
)
def test_no_request_changes_what_another_reads(asked):
    """Whatever texts others named before, documents of the prompt among them."""
    texts = [*map(tuple, DOCUMENTS[:3]), (70, 71, 72), (73,)]
    engine = build_engine(loaded("llama"), chunk_context="companions", position_strategy="sequential")
    for order, companions in asked[:5]:
        prompt = Prompt.from_tokens(SYSTEM, [DOCUMENTS[number] for number in order], QUESTION)
        check(engine, replace(prompt, companions=tuple(texts[number] for number in companions)))
