"""Models with learned or sinusoidal positions: chunks are exact where they were computed, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import GREEDY, answer, build_engine, dense_logits, token_ids
from support.families import build
from support.parity import check_cold_and_warm, prompts
from support.reference import eager_logits

from kvmosaic.assembly import check_movable
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidConfig, InvalidOffset, NotMovable, PromptTooLong
from kvmosaic.layout import arrange, dense
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt, Segment, SegmentKind

FAMILIES = ["gpt2", "opt", "biogpt", "gpt_bigcode", "gpt_neo", "xglm"]
"""OPT, BioGPT and XGLM look position p up in row p + 2; XGLM's rows are sines, GPT-Neo has windows besides."""


@cache
def loaded(family: str, dtype: torch.dtype = torch.float64) -> LoadedModel:
    return LoadedModel.from_module(build(family, dtype))


@st.composite
def placed_prompts(draw, most=300):
    """Prompts whose chunks say where they stand: anywhere behind the system prompt, also on each other."""
    prompt = draw(prompts(texts="between"))
    num_system = sum(segment.num_tokens for segment in prompt.segments if segment.kind is SegmentKind.SYSTEM)
    segments = [
        replace(segment, position_offset=draw(st.integers(num_system, num_system + most)))
        if segment.kind is SegmentKind.CHUNK
        else segment
        for segment in prompt.segments
    ]
    return replace(prompt, segments=tuple(segments))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6)
@given(prompt=placed_prompts(), block_size=st.sampled_from([1, 4, 16]), budget=st.sampled_from([5, 256]))
def test_absolute_chunks_agree_wherever_they_are_baked(family, prompt, block_size, budget):
    check_cold_and_warm(loaded(family), prompt, "absolute", "system", block_size, budget, True)


@settings(max_examples=10)
@given(prompt=placed_prompts(), block_size=st.sampled_from([1, 4, 16]))
def test_absolute_chunks_agree_in_float32(prompt, block_size):
    check_cold_and_warm(loaded("gpt2", torch.float32), prompt, "absolute", "system", block_size, 64, False)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5)
@given(prompt=placed_prompts(), strategy=st.sampled_from(["absolute", "shared"]))
def test_both_equal_unmodified_transformers_with_mask_and_positions(family, prompt, strategy):
    if strategy == "shared":
        prompt = replace(prompt, segments=tuple(replace(part, position_offset=None) for part in prompt.segments))
    model = loaded(family)
    engine = build_engine(model, position_strategy=strategy)
    for _ in range(2):
        request, logits = answer(engine, prompt)
        last = prompt.segments[-1]
        longer = replace(last, token_ids=(*last.token_ids, *token_ids(request)[:-1]))
        layout = dense(arrange(replace(prompt, segments=(*prompt.segments[:-1], longer)), strategy))
        expected = eager_logits(model.module, layout, [layer.mask for layer in model.layers])
        torch.testing.assert_close(logits, expected[-len(logits) :], atol=1e-10, rtol=0)


def test_a_chunk_is_reused_at_its_own_offset_and_computed_again_at_another():
    engine = build_engine(loaded("gpt2"), position_strategy="absolute")

    def prompt(offset: int) -> Prompt:
        chunk = Segment(SegmentKind.CHUNK, tuple(range(20, 33)), position_offset=offset)
        return Prompt((Segment(SegmentKind.SYSTEM, (1, 2, 3)), chunk, Segment(SegmentKind.QUESTION, (7, 8))))

    actions = [answer(engine, prompt(offset))[0].reuse.segments[1].action for offset in (9, 9, 40, 9, 40)]
    assert actions == ["computed", "reused", "computed", "reused", "reused"]


@pytest.mark.parametrize("family", FAMILIES)
def test_sequential_is_refused_with_the_reason_and_the_way_out(family):
    with pytest.raises(NotMovable, match=r"depend on the position.*'shared'.*'absolute'"):
        check_movable(loaded(family), ChunkCacheConfig(position_strategy="sequential"))
    check_movable(loaded(family), ChunkCacheConfig(position_strategy="shared"))
    check_movable(loaded(family), ChunkCacheConfig(position_strategy="absolute"))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_end_with_the_table(family):
    model = LoadedModel.from_module(build(family, torch.float32, max_position_embeddings=60))
    assert model.max_positions == 60
    engine = build_engine(model, position_strategy="absolute")

    def prompt(offset: int) -> Prompt:
        chunk = Segment(SegmentKind.CHUNK, tuple(range(20, 33)), position_offset=offset)
        return Prompt((Segment(SegmentKind.SYSTEM, (1, 2, 3)), chunk, Segment(SegmentKind.QUESTION, (7,))))

    most = 60 - 13 - 1 - 1  # the question's token, and room for one of the answer
    _, logits = answer(engine, prompt(most), replace(GREEDY, max_tokens=1))
    expected = dense_logits(model, arrange(prompt(most), "absolute"), [0])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    with pytest.raises(PromptTooLong, match="the model has 60"):
        engine.add_request(prompt(most + 1), GREEDY)
    with pytest.raises(InvalidOffset, match=r"position_offset 50 and 13 tokens.* 0 to 59; use an offset of at most 46"):
        engine.add_request(prompt(50), GREEDY)
    with pytest.raises(InvalidConfig, match="between 1 and 60"):
        LoadedModel.from_module(build(family, torch.float32, max_position_embeddings=60), max_positions=61)


@pytest.mark.parametrize("family", ["gpt2", "opt", "biogpt", "gpt_bigcode"])
def test_plain_prompts_give_the_tokens_of_transformers_generate(family):
    model = loaded(family, torch.float32)
    engine = build_engine(model, max_batched_tokens=16)
    generator = torch.Generator().manual_seed(3)
    params = replace(GREEDY, max_tokens=12, min_tokens=12, ignore_eos=False)
    module = model.module
    for length in (1, 23, 40):
        ids = torch.randint(3, 128, (length,), generator=generator)
        module.set_attn_implementation("eager")
        expected = module.generate(
            ids[None], attention_mask=torch.ones(1, length), do_sample=False, max_new_tokens=12, min_new_tokens=12
        )[0, length:]
        module.set_attn_implementation("kvmosaic")
        for _ in range(2):
            request, _ = answer(engine, Prompt.plain(ids.tolist()), params)
            assert token_ids(request) == expected.tolist()
