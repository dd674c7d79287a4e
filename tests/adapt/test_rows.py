"""Packed rows against the engine: the same log probabilities, from code that shares nothing but the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.adapters import random_adapter
from support.examples import examples
from support.families import build
from support.loaded import loaded_family, random_prompt

from kvmosaic import LLM
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.lab.adapt.distillation import PackedRows, composed_rows, forward, ordinary_rows
from kvmosaic.layout import ChunkContext, arrange
from kvmosaic.model import LoadedModel
from kvmosaic.prompt import Prompt

ANSWERS = [(7, 8, 9), (11, 12, 13, 14, 15)]


def engine_of(model: LoadedModel) -> LLM:
    config = ChunkCacheConfig(chunk_cache_size="4MiB", repair="none")
    return LLM(model, profile=False, chunk_cache_config=config, engine_config=EngineConfig(request_cache_size="4MiB"))


def packed_scores(model: LoadedModel, packed: PackedRows, question: int, adapter: str = "") -> list[list[float]]:
    """Log probabilities of each answer's tokens."""
    found = []
    for rows, answer in zip(packed.continuations, ANSWERS, strict=True):
        before = torch.arange(rows.start + question - 1, rows.stop - 1)
        with torch.inference_mode():
            logits = forward(model, packed, before, adapter).log_softmax(-1)
        found.append([float(row[token]) for row, token in zip(logits, answer, strict=True)])
    return found


def with_answers(prompt: Prompt) -> list[tuple[int, ...]]:
    question = prompt.segments[-1].token_ids or ()
    return [(*question, *answer) for answer in ANSWERS]


def assert_close(found: list[list[float]], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert max(abs(a - b) for a, b in zip(one, other.logprobs, strict=True)) < 1e-8


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("gemma2", "gpt_oss", "cohere2"))]
)
@pytest.mark.parametrize("strategy", ["sequential", pytest.param("shared", marks=pytest.mark.slow)])
@pytest.mark.parametrize("context", ["system", "companions", pytest.param("none", marks=pytest.mark.slow)])
def test_composed_rows_are_what_the_engine_computes(family: str, strategy: str, context: ChunkContext) -> None:
    model = loaded_family(family)
    prompt = replace(random_prompt(), companions=((21, 22, 23, 24),))
    packed = composed_rows(arrange(prompt, strategy, context), with_answers(prompt))
    expected = engine_of(model).score(
        [prompt, prompt], [list(answer) for answer in ANSWERS], position_strategy=strategy, chunk_context=context
    )
    assert_close(packed_scores(model, packed, prompt.segments[-1].num_tokens), expected)


def test_ordinary_rows_are_full_attention() -> None:
    model, prompt = loaded_family("llama"), random_prompt()
    packed = ordinary_rows(prompt, with_answers(prompt))
    expected = engine_of(model).score([prompt, prompt], [list(answer) for answer in ANSWERS], repair="full")
    assert_close(packed_scores(model, packed, prompt.segments[-1].num_tokens), expected)


def test_rows_of_an_adapter_are_what_the_engine_computes_with_it() -> None:
    module = build("llama", torch.float64)
    adapter, prompt = random_adapter(module), random_prompt()
    model = LoadedModel.from_module(module, adapters={"tuned": adapter})
    packed = composed_rows(arrange(prompt, "sequential"), with_answers(prompt))
    question = prompt.segments[-1].num_tokens
    llm = engine_of(model)
    answers = [list(answer) for answer in ANSWERS]
    asked = {"tuned": adapter.digest, "": ""}
    for name, digest in asked.items():
        named = replace(prompt, adapter=name)
        expected = llm.score([named, named], answers, position_strategy="sequential")
        assert_close(packed_scores(model, packed, question, digest), expected)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.integers(0, 6),
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.integers(1, 8),
    st.sampled_from(["sequential", "shared"]),
)
def test_rows_of_any_shape(system: int, chunks: list[int], question: int, strategy: str) -> None:
    model = loaded_family("llama")
    prompt = random_prompt(1, system=system, chunks=tuple(chunks), question=question)
    packed = composed_rows(arrange(prompt, strategy), with_answers(prompt))
    expected = engine_of(model).score(
        [prompt, prompt], [list(answer) for answer in ANSWERS], position_strategy=strategy, chunk_context="system"
    )
    assert_close(packed_scores(model, packed, question), expected)
