"""The Python face on real weights: ordinary prompts, sampling, and documents that outlive the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.real.prompts import DOCUMENTS, PLAIN, QUESTIONS, SYSTEM

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig, SamplingParams, TierConfig

COUNT = 40
GREEDY = SamplingParams(temperature=0, max_tokens=24)
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[0]}]


def opened(loaded, *tiers: str) -> LLM:
    return LLM(
        loaded,
        chunk_cache_config=ChunkCacheConfig(
            chunk_cache_size="64MiB", position_strategy="sequential", chunk_context="system", repair="none"
        ),
        engine_config=EngineConfig(request_cache_size="64MiB"),
        tier_config=TierConfig(chunk_tier=tiers, chunk_loading="always"),
        self_check=False,
    )


@pytest.fixture(scope="module")
def llm(loaded) -> Iterator[LLM]:
    with opened(loaded) as llm:
        yield llm


def sampled(llm: LLM, **params: object) -> list[list[int]]:
    said = {"max_tokens": 16, "ignore_eos": True, **params}
    (output,) = llm.chat(MESSAGES, SamplingParams(**said), documents=list(DOCUMENTS))
    return [list(answer.token_ids) for answer in output.outputs]


def test_ordinary_prompts_are_answered_as_by_generate(llm, twin) -> None:
    tokenizer, module = llm.model.tokenizer, twin()
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompts = [tokenizer.encode(text, add_special_tokens=text is not chat) for text in (*PLAIN, chat)]
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=COUNT))
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert list(answer.outputs[0].token_ids) == expected


def test_a_chat_ends_where_the_model_says(llm) -> None:
    answer = llm.chat([{"role": "user", "content": "Say hello."}], SamplingParams(temperature=0, max_tokens=100))[0]
    assert answer.outputs[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.outputs[0].text
    assert llm.model.eos_token_ids == (llm.model.tokenizer.convert_tokens_to_ids("<|im_end|>"),)


def test_a_seed_gives_the_same_answers_cold_and_warm_and_another_seed_others(llm) -> None:
    first = sampled(llm, seed=3, top_p=0.9, n=3)
    assert sampled(llm, seed=3, top_p=0.9, n=3) == first
    assert len({tuple(answer) for answer in first}) > 1
    assert sampled(llm, seed=11, top_p=0.9, n=3) != first


def test_narrow_sampling_is_greedy(llm) -> None:
    greedy = sampled(llm, temperature=0)
    assert sampled(llm, seed=1, top_k=1) == greedy
    assert sampled(llm, seed=1, top_p=1e-6) == greedy
    assert sampled(llm, seed=1, min_p=1) == greedy
    assert sampled(llm, seed=1, temperature=5.0) != greedy


def test_documents_are_found_again_after_a_restart_and_answer_the_same(loaded, tmp_path: Path) -> None:
    documents = [{"id": str(number), "text": text} for number, text in enumerate(DOCUMENTS)]
    place = f"disk:{tmp_path}?quota=1GiB"
    with opened(loaded, "host:32MiB", place) as first:
        (expected,) = first.chat(MESSAGES, GREEDY, documents=documents)
    with opened(loaded, place) as second:
        (found,) = second.chat(MESSAGES, GREEDY, documents=documents)
        notes = {segment.note for segment in found.reuse.segments if segment.kind == "chunk"}
        assert notes == {"loaded from disk"}
        assert second.get_chunk_cache_stats().computed_tokens == 0
        second.chat(MESSAGES, GREEDY, documents=documents[::-1])
        assert second.get_chunk_cache_stats().computed_tokens == 0
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
