"""Segments of any length: no border needs to meet the end of a block."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.vllm.asking import compose, difference, documents
from support.vllm.own import own_answer

LENGTHS = st.one_of(st.integers(1, 100), st.sampled_from([31, 32, 33, 63, 64, 65]))


@pytest.mark.parametrize("name", ["llama", "deepseek"])
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    system=st.one_of(st.just(0), LENGTHS),
    chunks=st.lists(LENGTHS, min_size=1, max_size=4),
    question=LENGTHS,
    strategy=st.sampled_from(["sequential", "shared"]),
    context=st.sampled_from(["system", "none"]),
    texts=st.lists(st.one_of(st.just(0), LENGTHS), min_size=4, max_size=4),
    seed=st.integers(0, 3),
)
@example(system=0, chunks=[1], question=1, strategy="sequential", context="system", texts=[0] * 4, seed=0)
@example(system=32, chunks=[32, 32], question=32, strategy="shared", context="system", texts=[0] * 4, seed=0)
def test_every_length_says_what_our_engine_says(
    vllm_engine, own_engine, name, system, chunks, question, strategy, context, texts, seed
):
    first, *rest, last = documents(seed, *([system] if system else [1]), *chunks, question)
    between = documents(seed + 9, *texts[: len(chunks)])
    how = {"position_strategy": strategy, "chunk_context": context}
    ask = compose(first if system else [], rest, last, between, **how)
    answer = vllm_engine(name).ask(ask)
    assert answer.is_composed, answer.report
    assert difference(answer, own_answer(own_engine(name, chunk_context=context), ask)) < 1e-4
