"""Weights on which rounding grows from layer to layer: a trained model's, if its folder is in KVMOSAIC_REAL_MODEL."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.vllm import faults
from support.vllm.asking import Ask, compose, difference, documents
from support.vllm.faults import places_of
from support.vllm.forking import ForkedEngine
from support.vllm.own import own_answer

from kvmosaic import LLM, ChunkCacheConfig, EngineConfig
from kvmosaic.vllm.worker.self_check import check

REAL = os.environ.get("KVMOSAIC_REAL_MODEL")
DTYPES = ("float32", "bfloat16", "float16")
CLOSE = 2e-3 if REAL else 0.1
FAULTS = ("window", "mixed_input", "far_output_smaller", "stored_values_smaller")


@pytest.fixture(scope="module")
def folder(vllm_model) -> Path:
    return Path(REAL) if REAL else vllm_model("deep")


@pytest.fixture(scope="module", params=DTYPES)
def engine(request, folder) -> Iterator[ForkedEngine]:
    engine = ForkedEngine(folder, dtype=request.param, max_model_len=2048, num_gpu_blocks_override=96)
    yield engine
    engine.stop()


def asked(folder: Path, **how: Any) -> Ask:
    """A prompt over three documents, of ordinary text where the model has read any."""
    system, *chunks, question = documents(5, 20, 90, 61, 120, 14)
    if REAL:
        from transformers import AutoTokenizer

        from kvmosaic.engine.self_check import ordinary_tokens

        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokens = iter(ordinary_tokens(tokenizer, len(tokenizer), 215))
        system, *chunks, question = ([next(tokens) for _ in range(length)] for length in (20, 60, 41, 80, 14))
    return replace(compose(system, chunks, question, **how), max_tokens=24)


def test_a_correct_model_is_composed_in_every_type(engine, folder):
    assert engine.call("trouble") == ""
    for strategy in ("sequential", "shared"):
        answer = engine.ask(asked(folder, position_strategy=strategy, repair=8))
        assert answer.is_composed, answer.report


def planted(engine: Any) -> list[list[str]]:
    """What the check says of faults in the first layer, one in the middle and the last: the layer's name first."""
    places, nested = places_of(engine)
    rotations = [lambda places, at, each=each: faults.rotation(places, at, each) for each in faults.ROTATIONS]
    said = []
    for plant in (*rotations, *(getattr(faults, name) for name in FAULTS)):
        for layer in (0, len(places.layers) // 2, -1):
            with plant(places, layer):
                said.append([places.layers[layer].name, check(places, nested)])
    return said


def test_faults_of_a_single_layer_are_found_in_every_type(engine):
    for name, said in engine.call(planted):
        assert said.startswith(f"{name}:"), said


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_answers_are_those_of_our_engine(folder, strategy):
    engine = ForkedEngine(folder, dtype="float32", max_model_len=2048, num_gpu_blocks_override=96)
    try:
        ask = asked(folder, position_strategy=strategy)
        theirs = engine.ask(ask)
        assert theirs.is_composed, theirs.report
    finally:
        engine.stop()
    own = LLM(
        folder,
        dtype="float32",
        chunk_cache_config=ChunkCacheConfig(chunk_cache_size="64MiB", repair="none", chunk_context="system"),
        engine_config=EngineConfig(request_cache_size="64MiB"),
    )
    ours = own_answer(own, ask)
    assert theirs.tokens == ours.tokens
    assert difference(theirs, ours) < CLOSE
