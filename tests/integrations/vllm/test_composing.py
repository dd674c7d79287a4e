"""Composed prompts inside vLLM: the numbers of our own engine, computed once, in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.vllm.asking import compose, difference, documents
from support.vllm.models import MODELS
from support.vllm.own import own_answer

CLOSE = 1e-4
SYSTEM, A, B, C, QUESTION = documents(7, 50, 83, 64, 131, 21)


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_log_probabilities_are_those_of_our_engine(vllm_engine, own_engine, name, strategy):
    ask = compose(SYSTEM, [A, B, C], QUESTION, position_strategy=strategy)
    theirs = vllm_engine(name).ask(ask)
    assert theirs.is_composed, theirs.report
    assert difference(theirs, own_answer(own_engine(name), ask)) < CLOSE


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_parts_of_a_document_are_one_after_the_other(vllm_engine, own_engine, name, strategy):
    engine = vllm_engine(name)
    engine.ask(compose(SYSTEM, [A, B, C], QUESTION, position_strategy=strategy))
    ask = compose(SYSTEM, [A, B, C], QUESTION, position_strategy=strategy, continues=(0, 1, 0))
    theirs = engine.ask(ask)
    assert theirs.is_composed, theirs.report
    assert difference(theirs, own_answer(own_engine(name), ask)) < CLOSE
    assert difference(engine.ask(ask), theirs) < CLOSE


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_without_context_too(vllm_engine, own_engine, name, strategy):
    ask = compose(SYSTEM, [B, A], QUESTION, position_strategy=strategy, chunk_context="none")
    theirs = vllm_engine(name).ask(ask)
    assert theirs.is_composed, theirs.report
    assert difference(theirs, own_answer(own_engine(name, chunk_context="none"), ask)) < CLOSE


KIN = tuple(map(tuple, documents(77, 23, 40)))
"""Companions of two documents after the first."""


@pytest.mark.parametrize("strategy", ["sequential", "shared"])
def test_documents_that_met_companions_too(vllm_engine, own_engine, name, strategy):
    engine, seen = vllm_engine(name), {"position_strategy": strategy, "chunk_context": "companions", "companions": KIN}
    engine.call("reset_prefix_cache")
    engine.ask(compose(SYSTEM, [C, A, B], QUESTION, **seen))
    for chunks, new in (([A, A, B], [0]), ([A, A, B, B], []), ([C, B, B], [1])):  # the third place is that of all later
        ask = compose(SYSTEM, chunks, QUESTION, **seen)
        theirs = engine.ask(ask)
        assert theirs.is_composed and "computed after companions" in theirs.report["composition"], theirs.report
        assert difference(theirs, own_answer(own_engine(name), ask)) < CLOSE
        assert [segment["kind"] for segment in theirs.report["segments"]] == [
            "system",
            *["chunk"] * len(chunks),
            "question",
        ]
        actions = [segment["action"] for segment in theirs.report["documents"]]
        assert [index for index, action in enumerate(actions) if action == "computed"] == new
    ask = compose(SYSTEM, [A, B, C], QUESTION, **{**seen, "companions": KIN[::-1]})
    assert difference(engine.ask(ask), own_answer(own_engine(name), ask)) < CLOSE, "others' copies are not theirs"


def test_companions_without_room_are_left_out(vllm_engine):
    engine = vllm_engine("llama")
    seen = {"chunk_context": "companions", "companions": ((9,) * 2000,)}
    theirs = engine.ask(compose(SYSTEM, [A, B], QUESTION, **seen))
    assert theirs.is_composed and "companions" not in theirs.report["composition"], theirs.report
    assert difference(theirs, engine.ask(compose(SYSTEM, [A, B], QUESTION))) < CLOSE
    wrong = compose(SYSTEM, [A, B], QUESTION, chunk_context="companions", companions=((10**6,),))
    assert "token 0 of the companion is 1000000" in engine.ask(wrong).report["bypass"]


def test_a_hit_says_what_a_miss_said(vllm_engine, name):
    engine = vllm_engine(name)
    system, *chunks, question = documents(8, 40, 70, 33, 64, 17)
    ask = compose(system, chunks, question)
    engine.call("reset_prefix_cache")
    missed, hit = engine.ask(ask), engine.ask(ask)
    engine.ask(compose(system, chunks[::-1], question))
    again = engine.ask(ask)
    assert missed.tokens == hit.tokens == again.tokens
    assert difference(missed, hit) < CLOSE and difference(missed, again) < CLOSE


def test_permuted_documents_compute_the_question_alone(vllm_engine, name):
    engine = vllm_engine(name)
    system, *chunks, question = documents(9, 45, 70, 90, 61, 17)
    engine.ask(compose(system, chunks, question))
    for order in ([2, 0, 1], [1, 2, 0], [0, 2]):
        ask = compose(system, [chunks[index] for index in order], question)
        answer = engine.ask(ask)
        assert answer.is_composed, answer.report
        assert answer.num_cached_tokens == len(ask.token_ids) - ask.question


def test_plain_prompts_are_bit_for_bit_those_of_vllm_without_the_plugin(vllm_engine, name):
    """Alone, the chunks saw no system prompt, so nothing of them is a prefix of the plain prompt."""
    bare, engine = vllm_engine(name, plugin=False), vllm_engine(name)
    system, *chunks, question = documents(10, 20, 96, 64, 32)
    ask = replace(compose(system, chunks, question, chunk_context="none"), max_tokens=8)
    composed = engine.ask(ask)
    for _ in range(2):  # computed, then from vLLM's prefix cache
        found, expected = engine.ask(ask.plain), bare.ask(ask.plain)
        assert found.num_cached_tokens == expected.num_cached_tokens
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert difference(composed, found) > 0.01, "composed and plain differ, or this test says nothing"
    assert difference(engine.ask(ask), composed) < CLOSE, "and no composed prompt met plain blocks"


def test_composed_blocks_are_hidden_from_plain_prompts_and_the_reverse(vllm_engine, name):
    bare, engine = vllm_engine(name, plugin=False), vllm_engine(name)
    system, *chunks, question = documents(11, 64, 96, 64, 32)
    ask = replace(compose(system, chunks, question), max_tokens=8)
    composed, plain = engine.ask(ask), engine.ask(ask.plain)
    assert plain.num_cached_tokens <= len(system) + len(chunks[0]), "the first chunk is exact"
    assert difference(plain, bare.ask(ask.plain)) < CLOSE
    assert difference(composed, plain) > 0.01
    swapped = compose(system, chunks[::-1], question)
    engine.ask(swapped.plain)
    assert difference(engine.ask(swapped), vllm_engine(name).ask(swapped)) < CLOSE
    assert difference(engine.ask(ask), composed) < CLOSE


def test_moved_keys_are_those_that_would_have_been_computed(vllm_engine, name):
    """Layer 0 sees the token and its position only, so there moved and recomputed keys are one; values too."""
    engine = vllm_engine(name)
    system, *chunks, question = documents(12, 50, 83, 64, 21)
    ask = compose(system, chunks, question)
    engine.ask(compose(system, chunks[::-1], question))
    moved = engine.call("first_layer", ask=ask.to_json())
    computed = engine.call("first_layer", ask=ask.plain.to_json(cache_salt="nothing cached"))
    assert len(moved) == len(computed) == len(ask.token_ids)
    largest = max(max(abs(x - y) for x, y in zip(a, b, strict=True)) for a, b in zip(moved, computed, strict=True))
    assert largest < 1e-6 * max(max(map(abs, row)) for row in computed)


def test_repairs_read_nothing_that_only_this_step_writes(vllm_engine):
    """An ordinary prompt that begins alike hands its blocks on while its step is still being scheduled."""
    engine = vllm_engine("llama")
    system, first, second, rest, question = documents(12, 32, 32, 33, 40, 9)
    ask = compose(system, [first, second], question, repair=5)
    engine.call("reset_prefix_cache")
    expected = engine.ask(ask)
    engine.call("reset_prefix_cache")
    engine.ask(compose(system, [second], question))
    beside = replace(ask.plain, token_ids=(*system, *first, *rest))
    _, answer = engine.generate([beside, ask])
    assert answer.is_composed and difference(expected, answer) < CLOSE


def test_documents_that_are_alike_are_read_in_full_unless_a_repair_is_set(vllm_engine):
    system, one, question = documents(7, 20, 40, 11)
    other = [*one[:20], *[token + 1 for token in one[20:23]], *one[23:]]
    ask = compose(system, [one, other], question)
    assert ask.composition is not None
    unsaid = replace(ask, composition=replace(ask.composition, leaves_repair_open=True))
    answer = vllm_engine("llama").ask(unsaid)
    assert "documents are alike, so they are read in full" in answer.report["bypass"]
    assert difference(answer, vllm_engine("llama", plugin=False).ask(ask.plain)) < CLOSE
    answer = vllm_engine("llama").ask(ask)
    assert answer.is_composed and "may be mixed up" in answer.report["composition"], answer.report
