"""Repair inside vLLM: the numbers of our own engine, for every strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.vllm.asking import compose, difference, documents
from support.vllm.own import own_answer

CLOSE = 1e-4
SYSTEM, *LIBRARY, QUESTION = documents(70, 50, 83, 64, 131, 40, 21)


@pytest.mark.parametrize("context", ["system", "none"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_repaired_documents_are_those_of_our_engine(vllm_engine, own_engine, strategy, count, context):
    ask = compose(SYSTEM, LIBRARY[:count], QUESTION, position_strategy=strategy, chunk_context=context, repair=9)
    theirs = vllm_engine("llama").ask(ask)
    assert theirs.is_composed, theirs.report
    assert difference(theirs, own_answer(own_engine("llama", chunk_context=context), ask)) < CLOSE


RUNS = ((), (0, 1, 5, 9, 60, 64), (3, 4, 31, 33), (39, 40))
"""Of chunks of 83, 64, 131 and 40 tokens."""


@pytest.mark.parametrize("reads", ["copy", "in-place"])
@pytest.mark.parametrize("name", ["llama", "deepseek"])
def test_repaired_runs_inside_documents_are_those_of_our_engine(vllm_engine, own_engine, name, reads):
    from support.vllm.models import ENGINE_OPTIONS

    environment = ENGINE_OPTIONS.get(name, {}).get("environment", {}) | {"KVMOSAIC_DOCUMENT_READS": reads}
    engine = vllm_engine(name, environment=environment)
    how = {"chunk_context": "companions", "companions": (tuple(QUESTION),), "repair": RUNS}
    for chunks in (LIBRARY, LIBRARY, [LIBRARY[3], *LIBRARY[1:3], LIBRARY[3]]):
        ask = compose(SYSTEM, chunks, QUESTION, **how)
        theirs = engine.ask(ask)
        assert theirs.is_composed and "repaired tokens of each" in theirs.report["composition"], theirs.report
        notes = [each["note"] for each in theirs.report["documents"][1:3]]
        again = [f"{number} of its tokens computed again" for number in (9, 3)]
        assert notes in (again, ["composed here before"] * 2)
        assert difference(theirs, own_answer(own_engine(name), ask)) < CLOSE
    ask = replace(ask, composition=replace(ask.composition, repair=(*RUNS[:2], (3, 4), RUNS[3])))
    assert difference(engine.ask(ask), own_answer(own_engine(name), ask)) < CLOSE, "blocks of another repair are others"


@pytest.mark.parametrize("reads", ["copy", "in-place"])
def test_a_document_that_is_like_one_before_it_is_read_in_full_alone_where_a_request_says_so(
    vllm_engine, own_engine, reads
):
    engine = vllm_engine("llama", environment={"KVMOSAIC_DOCUMENT_READS": reads})
    like = [*LIBRARY[2][:60], *QUESTION[:4], *LIBRARY[2][60:]]
    chunks = [LIBRARY[0], LIBRARY[2], LIBRARY[1], like, LIBRARY[3], LIBRARY[0]]
    ask = compose(SYSTEM, chunks, QUESTION, chunk_context="companions", companions=(tuple(QUESTION),))
    assert ask.composition is not None
    unsaid = replace(ask, composition=replace(ask.composition, leaves_repair_open=True))
    assert not engine.ask(unsaid).is_composed, "by default, all are"
    whole = replace(ask, composition=replace(ask.composition, repair=((), (), (), (0, len(like)), (), ())))
    for _ in range(2):
        theirs = engine.ask(whole)
        assert theirs.is_composed, theirs.report
        assert theirs.report["composition"].endswith("documents that are like one before them are read in full")
        assert difference(theirs, own_answer(own_engine("llama"), whole)) < CLOSE


@pytest.mark.parametrize("name", ["qwen3", "deepseek"])
def test_other_models_too(vllm_engine, own_engine, name):
    ask = compose(SYSTEM, LIBRARY, QUESTION, position_strategy="shared", repair=9)
    theirs = vllm_engine(name).ask(ask)
    assert theirs.is_composed, theirs.report
    assert difference(theirs, own_answer(own_engine(name), ask)) < CLOSE


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_a_prompt_that_begins_like_an_earlier_one_is_the_same(vllm_engine, own_engine, strategy):
    """Documents of the earlier prompt are in its blocks where the question sees them, not where repairs do."""
    engine = vllm_engine("llama")
    how = {"position_strategy": strategy, "repair": 9}
    engine.call("reset_prefix_cache")
    engine.ask(compose(SYSTEM, LIBRARY[:2], QUESTION, **how))
    for order in ([0, 1, 2, 3], [0, 1, 3], [0, 1, 3]):
        ask = compose(SYSTEM, [LIBRARY[index] for index in order], QUESTION, **how)
        theirs = engine.ask(ask)
        assert theirs.is_composed, theirs.report
        assert difference(theirs, own_answer(own_engine("llama"), ask)) < CLOSE


def test_sections_of_a_document_too(vllm_engine, own_engine):
    how = {"position_strategy": "shared", "repair": 9, "continues": (0, 1, 0, 1)}
    ask = compose(SYSTEM, LIBRARY, QUESTION, **how)
    theirs = vllm_engine("llama").ask(ask)
    assert theirs.is_composed, theirs.report
    assert difference(theirs, own_answer(own_engine("llama"), ask)) < CLOSE


def test_several_at_once_say_what_each_says_alone(vllm_engine):
    engine = vllm_engine("llama", max_num_batched_tokens=64)
    orders = ([0, 1, 2, 3], [0, 1], [3, 2, 1, 0], [0, 1, 3])
    asks = [
        compose(SYSTEM, [LIBRARY[i] for i in order], QUESTION, position_strategy="shared", repair=9) for order in orders
    ]
    alone = [vllm_engine("llama").ask(ask) for ask in asks]
    for _ in range(2):
        for answer, expected in zip(engine.generate(asks), alone, strict=True):
            assert answer.is_composed, answer.report
            assert difference(answer, expected) < CLOSE


def test_texts_between_shared_documents_are_not_composed_with_repair(vllm_engine):
    """Repairs need them one after the other, and a text the other way round."""
    engine = vllm_engine("llama")
    ask = compose(SYSTEM, LIBRARY[:2], QUESTION, [[], [7, 8, 9]], position_strategy="shared", repair=9)
    answer = engine.ask(ask)
    assert "between documents" in answer.report["bypass"] and "repair" in answer.report["bypass"]
    assert difference(answer, vllm_engine("llama", plugin=False).ask(ask.plain)) < CLOSE
    assert ask.composition is not None
    unsaid = replace(ask, composition=replace(ask.composition, repair=0, leaves_repair_open=True))
    unrepaired = replace(ask, composition=replace(ask.composition, repair=0))
    answer = engine.ask(unsaid)
    assert answer.is_composed, answer.report
    assert difference(answer, engine.ask(unrepaired)) < CLOSE
