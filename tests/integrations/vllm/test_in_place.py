"""Documents read in place: the numbers of copies and of our own engine, and no byte of a document twice."""

from __future__ import annotations

import pytest
from support.vllm.asking import compose, difference, documents
from support.vllm.own import own_answer

CLOSE = 1e-4
SYSTEM, A, B, C, QUESTION = documents(7, 50, 83, 64, 131, 21)
IN_PLACE = {"KVMOSAIC_DOCUMENT_READS": "in-place"}


@pytest.fixture(params=["llama", "qwen3", "deepseek"])
def name(request):
    return request.param


@pytest.fixture
def reading(vllm_engine, name):
    from support.vllm.models import ENGINE_OPTIONS

    environment = {**ENGINE_OPTIONS.get(name, {}).get("environment", {}), **IN_PLACE}
    return vllm_engine(name, environment=environment)


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_log_probabilities_are_those_of_our_engine(reading, own_engine, name, strategy):
    ask = compose(SYSTEM, [A, B, C], QUESTION, position_strategy=strategy)
    for _ in range(2):
        theirs = reading.ask(ask)
        assert theirs.is_composed, theirs.report
        assert difference(theirs, own_answer(own_engine(name), ask)) < CLOSE


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_without_context_too(reading, own_engine, name, strategy):
    ask = compose(SYSTEM, [B, A], QUESTION, position_strategy=strategy, chunk_context="none")
    theirs = reading.ask(ask)
    assert theirs.is_composed, theirs.report
    assert difference(theirs, own_answer(own_engine(name, chunk_context="none"), ask)) < CLOSE
