"""Texts before and between documents inside vLLM: a system text whose end changes, headings, numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.vllm.asking import compose, difference, documents
from support.vllm.models import MODELS
from support.vllm.own import own_answer

CLOSE = 1e-4
SYSTEM, A, B, C, QUESTION = documents(21, 50, 83, 64, 131, 21)
TODAY, TOMORROW, HEADING, NOTE = documents(22, 19, 19, 7, 40)


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.mark.parametrize("context", ["system", "none"])
@pytest.mark.parametrize("strategy", ["sequential", "shared"])
@pytest.mark.parametrize(
    ("system", "texts"),
    [(SYSTEM, [TODAY, [], []]), (SYSTEM, [TODAY, HEADING, NOTE]), (SYSTEM, [[], HEADING, []]), ([], [TODAY, [], NOTE])],
    ids=["rest", "rest and texts", "text", "no preamble"],
)
def test_log_probabilities_are_those_of_our_engine(vllm_engine, own_engine, name, strategy, context, system, texts):
    ask = compose(system, [A, B, C], QUESTION, texts, position_strategy=strategy, chunk_context=context)
    theirs = vllm_engine(name).ask(ask)
    assert theirs.is_composed, theirs.report
    assert difference(theirs, own_answer(own_engine(name, chunk_context=context), ask)) < CLOSE


def test_documents_are_found_again_behind_another_rest(vllm_engine, own_engine, name):
    engine = vllm_engine(name)
    engine.call("reset_prefix_cache")
    today = compose(SYSTEM, [A, B], QUESTION, [TODAY, []])
    tomorrow = compose(SYSTEM, [B, A], QUESTION, [TOMORROW, []])
    engine.ask(today)
    answer = engine.ask(tomorrow)
    rows = [(row["kind"], row["reused_tokens"]) for row in answer.report["segments"]]
    assert rows == [("system", 50), ("text", 0), ("chunk", 64), ("chunk", 83), ("question", 0)]
    assert "documents saw 50 of 69 tokens before them" in answer.report["composition"]
    assert difference(answer, own_answer(own_engine(name), tomorrow)) < CLOSE
    again = engine.ask(replace(tomorrow, token_ids=(*tomorrow.token_ids[:-3], *A[:3])))
    assert [row["reused_tokens"] for row in again.report["segments"]][:4] == [50, 19, 64, 83]


def test_a_hit_says_what_a_miss_said(vllm_engine, name):
    engine = vllm_engine(name)
    ask = compose(SYSTEM, [C, A, B], QUESTION, [TODAY, HEADING, NOTE])
    engine.call("reset_prefix_cache")
    missed, hit = engine.ask(ask), engine.ask(ask)
    engine.ask(compose(SYSTEM, [C, A, B], QUESTION, [TOMORROW, HEADING, NOTE]))
    again = engine.ask(replace(ask, cache_salt=None))
    assert missed.tokens == hit.tokens == again.tokens
    assert difference(missed, hit) < CLOSE and difference(missed, again) < CLOSE


def test_texts_hide_from_ordinary_prompts_and_from_other_boundaries(vllm_engine, name):
    """The same tokens as text, as documents and as an ordinary prompt: three different results."""
    bare, engine = vllm_engine(name, plugin=False), vllm_engine(name)
    texts = compose(SYSTEM, [A, B], QUESTION, [TODAY, NOTE])
    chunks = compose(SYSTEM, [TODAY, A, NOTE, B], QUESTION)
    answers = [engine.ask(texts), engine.ask(chunks), engine.ask(texts.plain)]
    assert difference(answers[2], bare.ask(texts.plain)) < CLOSE
    assert difference(answers[0], answers[1]) > 10 * CLOSE and difference(answers[0], answers[2]) > 10 * CLOSE
    for ask, answer in zip([texts, chunks, texts.plain], answers, strict=True):
        assert difference(engine.ask(ask), answer) < CLOSE


def test_a_repair_sees_the_texts_too(vllm_engine, name):
    """With all tokens repaired, a composed prompt is an ordinary one."""
    engine = vllm_engine(name)
    ask = compose(SYSTEM, [A, B], QUESTION, [TODAY, HEADING], repair=200)
    assert difference(engine.ask(ask), engine.ask(ask.plain)) < CLOSE


def test_without_repair_a_text_between_documents_is_a_reason_to_bypass_and_a_rest_is_not(vllm_engine):
    engine = vllm_engine("llama", enable_prompt_embeds=True)
    answer = engine.ask(compose(SYSTEM, [A, B], QUESTION, [TODAY, HEADING]))
    assert "text between documents cannot be computed" in answer.report["bypass"]
    rest = compose(SYSTEM, [A, B], QUESTION, [TODAY, []])
    answer = engine.ask(rest)
    assert answer.is_composed, answer.report
    assert difference(answer, vllm_engine("llama").ask(rest)) < CLOSE
