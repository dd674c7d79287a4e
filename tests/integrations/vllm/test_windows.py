"""Models with sliding windows: where vLLM keeps all tokens in every layer, documents are composed."""

from __future__ import annotations

from typing import Any

import pytest
from support.vllm.asking import compose, difference, documents
from support.vllm.checking import checked
from support.vllm.faults import places_of
from support.vllm.in_place import reads, watch_reads
from support.vllm.models import SHARED, WINDOWS
from support.vllm.own import own_answer

from kvmosaic.vllm.worker.self_check import check

CLOSE = 1e-4
SYSTEM, A, B, C, QUESTION = documents(9, 50, 83, 64, 131, 21)
OPTIONS = {"max_model_len": 2048, "disable_hybrid_kv_cache_manager": True}


@pytest.fixture(params=WINDOWS)
def name(request):
    return request.param


@pytest.fixture
def engine(vllm_engine, name):
    return vllm_engine(name, **OPTIONS)


@pytest.fixture
def reading(vllm_engine, name):
    """An engine that reads in place."""
    made = vllm_engine(name, environment={"KVMOSAIC_DOCUMENT_READS": "in-place"}, **OPTIONS)
    made.call(watch_reads)
    return made


@pytest.mark.parametrize("context", ["system", "none"])
def test_log_probabilities_are_those_of_our_engine_in_any_order(engine, own_engine, name, context):
    own = own_engine(name, chunk_context=context)
    for chunks in ([A, B, C], [C, A, B], [B]):
        ask = compose(SYSTEM, chunks, QUESTION, position_strategy="sequential", chunk_context=context)
        theirs = engine.ask(ask)
        assert theirs.is_composed, theirs.report
        assert difference(theirs, own_answer(own, ask)) < CLOSE


@pytest.mark.parametrize("repair", [0, 9])
def test_repair_and_text_between_documents_too(engine, own_engine, name, repair):
    ask = compose(SYSTEM, [A, B], QUESTION, [[], [7, 8, 9]], position_strategy="sequential", repair=repair)
    theirs = engine.ask(ask)
    assert theirs.is_composed, theirs.report
    assert difference(theirs, own_answer(own_engine(name), ask)) < CLOSE


@pytest.mark.parametrize("repair", [0, 9])
@pytest.mark.parametrize("texts", [(), ([7, 8, 9], [], [4] * 5)], ids=["", "texts"])
def test_documents_read_in_place_are_seen_as_far_as_a_window_goes(reading, own_engine, name, repair, texts):
    for chunks in ([A, B, C], [C, A, B]):
        how = {"position_strategy": "sequential", "repair": repair}
        ask = compose(SYSTEM, chunks, QUESTION, texts, **how)
        reading.call(reads)
        theirs = reading.ask(ask)
        assert theirs.is_composed and not theirs.report["warnings"], theirs.report
        assert difference(theirs, own_answer(own_engine(name), ask)) < CLOSE
        first = repair if texts else 0  # right after the system text, a document is exact as it is
        assert reading.call(reads) == [[len(chunks[0]) - first, *(len(chunk) - repair for chunk in chunks[1:])]]


def test_layers_that_read_the_cache_of_another_layer_see_what_was_moved_for_it(vllm_engine, own_engine):
    made = vllm_engine(SHARED, environment={"KVMOSAIC_DOCUMENT_READS": "in-place"}, **OPTIONS)
    for chunks, repair in (([A, B, C], 0), ([C, A, B], 9), ([B], 0)):
        ask = compose(SYSTEM, chunks, QUESTION, position_strategy="sequential", repair=repair)
        theirs = made.ask(ask)
        assert theirs.is_composed, theirs.report
        assert difference(theirs, own_answer(own_engine(SHARED), ask)) < CLOSE
        (warning,) = theirs.report["warnings"]
        assert "layers that read the cache of another layer are not read in place" in warning


def test_known_documents_are_not_computed_again(engine):
    engine.ask(compose(SYSTEM, [A, B, C], QUESTION, position_strategy="sequential"))
    again = compose(SYSTEM, [C, B, A], QUESTION, position_strategy="sequential")
    assert engine.ask(again).num_cached_tokens == len(again.token_ids) - len(QUESTION)


def test_shared_positions_are_read_in_place(reading, own_engine, name):
    for chunks in ([A, B, C], [C, A]):
        ask = compose(SYSTEM, chunks, QUESTION, position_strategy="shared", leaves_repair_open=True)
        theirs = reading.ask(ask)
        assert theirs.is_composed, theirs.report
        assert difference(theirs, own_answer(own_engine(name), ask)) < CLOSE


def test_repair_there_would_need_copies(reading):
    answer = reading.ask(compose(SYSTEM, [A, B], QUESTION, position_strategy="shared", repair=8))
    assert "use repair 'none'" in answer.report["bypass"]


def test_shared_positions_are_not_copied_and_the_reason_is_said(engine, vllm_engine, name):
    """A window there counts tokens, and positions are fewer."""
    ask = compose(SYSTEM, [A, B], QUESTION, position_strategy="shared")
    answer = engine.ask(ask)
    assert "sequential" in answer.report["bypass"]
    assert difference(answer, vllm_engine(name, plugin=False, **OPTIONS).ask(ask.plain)) < CLOSE


def test_ordinary_prompts_are_those_of_vllm_without_the_plugin(engine, vllm_engine, name):
    ask = compose(SYSTEM, [A, B, C], QUESTION).plain
    assert difference(engine.ask(ask), vllm_engine(name, plugin=False, **OPTIONS).ask(ask)) == 0


def test_how_a_model_is_composed_whose_tokens_leave_the_cache(vllm_engine):
    answer = vllm_engine("gemma3", max_model_len=2048).ask(compose(SYSTEM, [A, B], QUESTION))
    assert "--disable-hybrid-kv-cache-manager" in answer.report["bypass"]


def windows_off_by_one(engine: Any) -> list[list[str]]:
    """What the check at start says, and what it says of each layer whose kernel has a window of one token less."""
    places, nested = places_of(engine)
    said = [["", check(places, nested)]]
    for place in places.layers:
        implementation = place.layer.impl
        original = implementation.sliding_window
        if place.window:
            implementation.sliding_window = _one_less(original)
            said.append([place.name, check(places, nested)])
            implementation.sliding_window = original
    return said


def _one_less(window: Any) -> Any:
    return (window[0] - 1, *window[1:]) if isinstance(window, tuple | list) else window - 1


def test_the_check_at_start_knows_how_wide_windows_are(engine):
    (_, found), *wrong = engine.call(windows_off_by_one)
    assert found == ""
    assert len(wrong) == 2
    for layer, said in wrong:
        assert said.startswith(f"{layer}: attention at positions"), said


@pytest.mark.parametrize("faults", [(), ("turn back",)])
def test_the_check_of_a_model_compares_with_dense_attention_in_its_windows(vllm_model, faults):
    found = checked(str(vllm_model("gemma3")), faults=faults, options=["--disable-hybrid-kv-cache-manager"])
    assert found["passed"] == (not faults), found["findings"]
    assert found["findings"]
