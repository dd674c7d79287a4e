"""The vLLM plugin against our own engine, on the same real weights in float32."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.real.prompts import DOCUMENTS, QUESTIONS, parts
from support.vllm.asking import Ask, compose, difference
from support.vllm.faults import places_of
from support.vllm.forking import ForkedEngine
from support.vllm.mistakes import FAULTS, MISTAKES
from support.vllm.own import own_answer

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig
from kvmosaic.vllm.worker.self_check import check, check_attention, check_caches

NEAR = 2e-3
"""Largest difference of log-probabilities of real weights in float32."""
COUNT = 24


@pytest.fixture(scope="module")
def engine(model_folder: Path) -> Iterator[ForkedEngine]:
    engine = ForkedEngine(model_folder, num_gpu_blocks_override=96)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def own(model_folder: Path, engine: ForkedEngine):
    """Our engine; made after vLLM's, which is a fork of this process."""
    from kvmosaic.model import load_model

    model = load_model(model_folder, dtype="float32", device="cpu")

    def make(context: str) -> LLM:
        config = ChunkCacheConfig(
            chunk_cache_size="64MiB", position_strategy="sequential", chunk_context=context, repair="none"
        )
        return LLM(
            model, chunk_cache_config=config, engine_config=EngineConfig(request_cache_size="64MiB"), self_check=False
        )

    made = {context: make(context) for context in ("system", "none")}
    return made.__getitem__


def ask(own, question: str, documents, **how: str) -> Ask:
    system, chunks, asked = parts(own("system").model.tokenizer, question, documents)
    composed = compose(system, chunks, asked, repair=0, **how)
    return Ask(composed.token_ids, composed.composition, max_tokens=COUNT)


@pytest.mark.parametrize("context", ["system", "none"])
@pytest.mark.parametrize("strategy", ["shared", "sequential"])
def test_tokens_and_log_probabilities_are_those_of_our_engine(engine, own, strategy: str, context: str) -> None:
    for documents in (DOCUMENTS[:3], DOCUMENTS[2::-1]):
        asked = ask(own, QUESTIONS[0], documents, position_strategy=strategy, chunk_context=context)
        theirs, ours = engine.ask(asked), own_answer(own(context), asked)
        assert theirs.is_composed, theirs.report
        assert theirs.tokens == ours.tokens
        assert difference(theirs, ours) < NEAR


def test_documents_in_another_order_are_not_computed_again(engine, own) -> None:
    how = {"position_strategy": "sequential", "chunk_context": "system"}
    engine.ask(ask(own, QUESTIONS[1], DOCUMENTS, **how))
    again = ask(own, QUESTIONS[1], DOCUMENTS[::-1], **how)
    answer = engine.ask(again)
    assert answer.is_composed, answer.report
    assert answer.num_cached_tokens == len(again.token_ids) - again.question


def test_an_ordinary_prompt_is_that_of_our_engine(engine, own) -> None:
    asked = ask(own, QUESTIONS[2], DOCUMENTS).plain
    theirs, ours = engine.ask(asked), own_answer(own("system"), asked)
    assert theirs.tokens == ours.tokens
    assert difference(theirs, ours) < NEAR


DTYPES = ("float32", "bfloat16")
PLANTED = ("other_frequency", "larger_keys_far_out", "kernel_scale", "stored_elsewhere", "far_output_smaller")


def checked(engine, *, begins_in_the_middle: bool) -> dict[str, object]:
    """What the checks at start say of the model, and of faults and mistakes in turn in its first and a middle layer.

    The attention of each layer is called alone, so a fault is looked for among few layers: its own, and the one before.
    """
    places, nested = places_of(engine)
    wrong = []
    turns = itertools.cycle((0, len(places.layers) // 2))
    if begins_in_the_middle:
        next(turns)

    def some(layer: int) -> tuple[int, ...]:
        return tuple(range(max(0, layer - 1), layer + 1))

    for fault in PLANTED:
        layer = next(turns)
        with FAULTS[fault](places, layer):
            layers = tuple(places.layers[i] for i in some(layer))
            wrong.append([fault, places.layers[layer].name, check_attention(replace(places, layers=layers), nested)])
    for mistake, change in MISTAKES.items():
        layer = next(turns)
        layers = tuple(change(place) if i == layer else place for i, place in enumerate(places.layers))
        layers = tuple(layers[i] for i in some(layer))
        wrong.append([mistake, places.layers[layer].name, check_attention(replace(places, layers=layers), nested)])
    correct = [check(places, nested), check_attention(places, nested), check_caches(places, nested.max_length)]
    return {"correct": correct, "wrong": wrong}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_checks_at_start_pass_real_weights_and_find_faults_in_any_layer(model_folder: Path, dtype: str) -> None:
    engine = ForkedEngine(model_folder, dtype=dtype, max_model_len=4096, num_gpu_blocks_override=256)
    try:
        said = engine.call(checked, begins_in_the_middle=dtype == "bfloat16")  # so that each fault has been in both
    finally:
        engine.stop()
    assert said["correct"] == ["", "", ""]
    for fault, name, found in said["wrong"]:
        assert found.startswith(f"{name}:"), (fault, found)
