"""A KV cache in float8, whose kernel on this CPU is a stand-in: documents are read as what their bytes mean."""

from __future__ import annotations

import pytest
from support.vllm import eight_bits
from support.vllm.asking import compose, difference, documents
from support.vllm.forking import ForkedEngine
from support.vllm.in_place import found_by_check, reads, watch_reads
from support.vllm.own import own_answer

SYSTEM, A, B, C, QUESTION = documents(7, 50, 83, 64, 131, 21)
NAMES = ("fp8", "fp8_e5m2")
NOISE = {"fp8": 0.15, "fp8_e5m2": 0.3}
"""Largest difference of log-probabilities that the rounding of keys and values explains here; wrong keys: above 1."""


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module", params=["in-place", "copy"])
def way(request):
    return request.param


@pytest.fixture(scope="module")
def engine(vllm_model, name, way):
    engine = ForkedEngine(
        vllm_model("llama"),
        environment={"KVMOSAIC_DOCUMENT_READS": way},
        prepare=eight_bits.install,
        kv_cache_dtype=name,
    )
    engine.call(watch_reads)
    yield engine
    engine.stop()


@pytest.mark.parametrize("repair", [0, 5])
@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_answers_are_those_of_our_engine_but_for_the_rounding_of_the_cache(
    engine, own_engine, name, way, strategy, repair
):
    for chosen in ([A, B, C], [C, A, B]):
        ask = compose(SYSTEM, chosen, QUESTION, position_strategy=strategy, repair=repair)
        answer = engine.ask(ask)
        assert answer.is_composed, answer.report
        assert difference(answer, own_answer(own_engine("llama"), ask)) < NOISE[name]
        warnings = answer.report["warnings"]
        is_read = way == "in-place" and not (repair and strategy == "shared")
        assert bool(engine.call(reads)) == is_read
        is_moved = not is_read and (strategy == "sequential" or repair > 0)
        assert any("rounded to float8" in each for each in warnings) == is_moved, warnings


def test_a_document_that_is_not_moved_is_read_as_in_an_ordinary_prompt(engine):
    """The same bytes, by another kernel: what is left is a number that sums in another order round the other way."""
    ask = compose(SYSTEM, [A], QUESTION, position_strategy="sequential")
    engine.ask(ask)
    assert engine.ask(ask).is_composed
    assert difference(engine.ask(ask), engine.ask(ask.plain)) < 0.02


def test_the_check_at_start_finds_faults(engine, way):
    if way == "in-place":
        assert engine.call(found_by_check, fault="") == ""
        for fault in ("turned_the_other_way", "values_smaller", "sharper"):
            assert "differs by" in engine.call(found_by_check, fault=fault), fault
