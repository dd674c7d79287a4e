"""Models with a bias by distance (ALiBi): chunks computed anywhere are exact anywhere, and nothing is turned."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.endless import streaming_logits
from support.engines import GREEDY, answer, build_engine, dense_logits, token_ids
from support.families import build
from support.parity import check_cold_and_warm, prompts, settings_of_a_run
from support.reference import eager_logits

from kvmosaic.engine.self_check.whole import run_self_check
from kvmosaic.errors import NotMovable
from kvmosaic.layout import arrange, dense
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

MOVABLE = ["bloom", "bloom_twelve", "mpt", "mpt_twelve"]
"""With 4 heads, and with 12, whose slopes are not powers of two."""
ROUNDED = ["falcon_alibi", "falcon_alibi_twelve"]
"""Their bias is rounded to bfloat16, whatever they compute in."""
WRITTEN_IN = [*MOVABLE, *ROUNDED, "falcon", "falcon_groups", "gptj", "codegen", "gpt_neo", "xglm"]


@cache
def loaded(family: str, dtype: torch.dtype = torch.float64) -> LoadedModel:
    return LoadedModel.from_module(build(family, dtype))


@pytest.mark.parametrize("family", ["bloom_twelve", "mpt_twelve"])
@settings(max_examples=15)
@given(prompt=prompts(), **settings_of_a_run)
def test_dense_cold_and_warm_agree_wherever_chunks_are_moved(
    family, prompt, strategy, context, block_size, budget, fragmented
):
    check_cold_and_warm(loaded(family), prompt, strategy, context, block_size, budget, fragmented)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=10)
@given(prompt=prompts(), **settings_of_a_run)
def test_dense_cold_and_warm_agree_in_lower_precision(dtype, prompt, strategy, context, block_size, budget, fragmented):
    check_cold_and_warm(loaded("bloom_twelve", dtype), prompt, strategy, context, block_size, budget, fragmented)


@pytest.mark.parametrize("family", ROUNDED)
@settings(max_examples=8)
@given(prompt=prompts(texts="between"), block_size=st.sampled_from([1, 4, 16]), budget=st.sampled_from([5, 256]))
def test_a_rounded_bias_is_exact_where_it_was_computed(family, prompt, block_size, budget):
    check_cold_and_warm(loaded(family), prompt, "shared", "system", block_size, budget, False)


@pytest.mark.parametrize("family", ROUNDED)
def test_a_rounded_bias_cannot_be_moved(family):
    engine = build_engine(loaded(family), position_strategy="sequential")
    with pytest.raises(NotMovable, match=r"rounded to bfloat16.*'shared'"):
        engine.add_request(Prompt.from_tokens([1, 2], [[3, 4], [5, 6]], [7]), GREEDY)
    assert LoadedModel.from_module(build(family, torch.bfloat16)).is_movable, "there everything is rounded"


@pytest.mark.parametrize("family", [*MOVABLE, *ROUNDED, "gptj"])
@settings(max_examples=6)
@given(prompt=prompts(texts="between"))
def test_shared_equals_unmodified_transformers_with_mask_and_bias(family, prompt):
    model = loaded(family)
    request, logits = answer(build_engine(model), prompt)
    last = prompt.segments[-1]
    longer = replace(last, token_ids=(*last.token_ids, *token_ids(request)[:-1]))
    layout = dense(arrange(replace(prompt, segments=(*prompt.segments[:-1], longer))))
    expected = eager_logits(model.module, layout, [layer.mask for layer in model.layers])
    torch.testing.assert_close(logits, expected[-len(logits) :], atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", MOVABLE)
@settings(max_examples=6)
@given(prompt=prompts(texts="between"))
def test_blind_chunks_moved_behind_each_other_equal_unmodified_transformers(family, prompt):
    model = loaded(family)
    engine = build_engine(model, position_strategy="sequential", chunk_context="none")
    for _ in range(2):
        request, logits = answer(engine, prompt)
        last = prompt.segments[-1]
        longer = replace(last, token_ids=(*last.token_ids, *token_ids(request)[:-1]))
        layout = dense(arrange(replace(prompt, segments=(*prompt.segments[:-1], longer)), "sequential", "none"))
        expected = eager_logits(model.module, layout, [layer.mask for layer in model.layers])
        torch.testing.assert_close(logits, expected[-len(logits) :], atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", MOVABLE)
def test_the_same_chunk_twice_is_read_twice_and_stored_once(family):
    model, chunk = loaded(family), list(range(20, 33))
    prompt = Prompt.from_tokens([1, 2, 3], [chunk, list(range(50, 59)), chunk], [4, 5, 6])
    engine = build_engine(model, position_strategy="sequential")
    for _ in range(2):
        request, logits = answer(engine, prompt)
        expected = dense_logits(model, arrange(prompt, "sequential"), token_ids(request))
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)
    assert engine.kv_cache.statistics().cached_chunks == 2


@pytest.mark.parametrize("family", MOVABLE)
def test_requests_of_one_step_read_a_chunk_from_their_own_distances(family):
    model = loaded(family)
    first, second, third = list(range(20, 33)), list(range(50, 59)), list(range(70, 90))
    orders = [[first, second, third], [third, second, first], [second], [third, first]]
    prompts_of_a_step = [Prompt.from_tokens([1, 2, 3], order, [4, 5, 6]) for order in orders]
    engine = build_engine(model, position_strategy="sequential")
    alone = [answer(engine, prompt)[1][0] for prompt in prompts_of_a_step]
    expected = [dense_logits(model, arrange(prompt, "sequential"), [0])[0] for prompt in prompts_of_a_step]
    engine.runner.logits.clear()
    for prompt in prompts_of_a_step:
        engine.add_request(prompt, GREEDY)
    engine.step()
    (together,) = engine.runner.logits
    for one, same, twin in zip(together, alone, expected, strict=True):
        torch.testing.assert_close(one, twin, atol=1e-10, rtol=0)
        torch.testing.assert_close(same, twin, atol=1e-10, rtol=0)
    while engine.has_unfinished_requests:
        engine.step()


@pytest.mark.parametrize("family", ["bloom_twelve", "mpt"])
@pytest.mark.parametrize(("num_prompt", "sinks", "window", "budget"), [(20, 4, 5, 256), (3, 0, 6, 3), (50, 2, 14, 7)])
def test_a_text_without_end_keeps_the_distances_in_its_window(family, num_prompt, sinks, window, budget):
    model = loaded(family)
    engine = build_engine(model, blocks=(150, 8), max_batched_tokens=budget, block_size=3)
    ids = torch.randint(3, 128, (num_prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    endless = replace(GREEDY, max_tokens=18, sink_tokens=sinks, window_tokens=window)
    request, logits = answer(engine, Prompt.plain(ids), endless)
    expected = streaming_logits(model, [*ids, *token_ids(request)[:-1]], sinks, window)[num_prompt - 1 :]
    torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", WRITTEN_IN)
def test_plain_prompts_give_the_tokens_of_transformers_generate(family):
    model = loaded(family, torch.float32)
    engine = build_engine(model, max_batched_tokens=16)
    generator = torch.Generator().manual_seed(3)
    params = replace(GREEDY, max_tokens=12, min_tokens=12, ignore_eos=False)
    for length in (1, 23, 40):
        ids = torch.randint(0, 128, (length,), generator=generator)
        expected = model.module.generate(
            ids[None], attention_mask=torch.ones(1, length), do_sample=False, max_new_tokens=12, min_new_tokens=12
        )[0, length:]
        for _ in range(2):
            request, _ = answer(engine, Prompt.plain(ids.tolist()), params)
            assert token_ids(request) == expected.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("family", ["bloom_twelve", "mpt", "falcon_alibi_twelve", "falcon_groups", "gpt_neo", "xglm"])
def test_the_self_check_passes_and_moves_what_can_be_moved(family, dtype):
    model = loaded(family, dtype)
    check = run_self_check(model)
    assert check.passed, check.reason
    assert check.is_moved == model.is_movable
