"""vLLM may move fewer tokens into a request's blocks than it was told: then the request is an ordinary prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.vllm.asking import compose, difference, documents
from support.vllm.forking import CONNECTOR

CLOSE = 1e-4
SYSTEM, *LIBRARY, QUESTION = documents(80, 50, 83, 64, 131, 70, 21)
RECOMPUTE = {**CONNECTOR, "kv_load_failure_policy": "recompute"}
HOW = [{}, {"position_strategy": "shared"}, {"position_strategy": "shared", "repair": 9}]


def take(engine: Any, most: int | None, resumed: bool = False) -> None:
    """From now on vLLM takes at most so many external tokens, as it does where it must compute the others itself."""
    connector = engine.scheduler.connector
    vars(connector).pop("get_num_new_matched_tokens", None)
    if most is None:
        return
    original = connector.get_num_new_matched_tokens

    def capped(request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        number, is_async = original(request, num_computed_tokens)
        if number is None or (resumed and not request.num_preemptions):
            return number, is_async
        return min(number, most), is_async

    connector.get_num_new_matched_tokens = capped


def at_rest(engine):
    state = engine.call("settle")
    assert not state["referenced"] and not state["requests"], state
    assert state["free"] == state["num_blocks"] - 1, state


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("most", [0, 32])
def test_the_answer_is_that_of_an_ordinary_prompt_and_says_so(vllm_engine, how, most):
    engine, bare = vllm_engine("llama", kv_transfer_config=RECOMPUTE), vllm_engine("llama", plugin=False)
    ask = replace(compose(SYSTEM, LIBRARY[:3], QUESTION, **how), max_tokens=40)
    expected = vllm_engine("llama").ask(ask)
    engine.call("reset_prefix_cache")
    engine.call(take, most=most)
    answer = engine.ask(ask)
    engine.call(take, most=None)
    at_rest(engine)
    assert f"vLLM took {most} of" in answer.report["bypass"]
    assert difference(answer, bare.ask(ask.plain)) < CLOSE
    for _ in range(2):  # and nothing of it is found under a wrong name
        again = engine.ask(ask)
        assert again.is_composed and difference(again, expected) < CLOSE
        assert difference(engine.ask(ask.plain), bare.ask(ask.plain)) < CLOSE


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("most", [0, 32])
def test_so_is_one_that_begins_with_blocks_of_a_composed_prompt(vllm_engine, how, most):
    engine, bare = vllm_engine("llama", kv_transfer_config=RECOMPUTE), vllm_engine("llama", plugin=False)
    before = compose(SYSTEM, LIBRARY[:2], QUESTION, **how)
    ask = compose(SYSTEM, LIBRARY, QUESTION, **how)
    expected = vllm_engine("llama").ask(ask)
    engine.call("reset_prefix_cache")
    engine.ask(before)
    engine.call(take, most=most)
    answer = engine.ask(ask)
    engine.call(take, most=None)
    at_rest(engine)
    assert f"vLLM took {most} of" in answer.report["bypass"]
    assert difference(answer, bare.ask(ask.plain)) < CLOSE
    assert difference(engine.ask(ask), expected) < CLOSE
    assert difference(engine.ask(before), vllm_engine("llama").ask(before)) < CLOSE


def test_where_vllm_fails_requests_that_were_not_loaded_it_fails(vllm_engine):
    """vLLM's default; what vLLM counts as computed and nobody loaded is not answered from."""
    engine = vllm_engine("llama")
    ask = compose(SYSTEM, LIBRARY[:3], QUESTION)
    expected = engine.ask(ask)
    engine.call("reset_prefix_cache")
    engine.call(take, most=32)
    (answer,) = engine.generate([ask])
    engine.call(take, most=None)
    at_rest(engine)
    assert answer.tokens == []
    assert difference(engine.ask(ask), expected) < CLOSE


def test_a_preempted_prompt_that_comes_back_goes_on_as_an_ordinary_one(vllm_engine):
    small = vllm_engine("llama", kv_transfer_config=RECOMPUTE, num_gpu_blocks_override=40)
    small.call("count_preemptions")
    small.call(take, most=0, resumed=True)
    chunks = documents(81, 37, 61, 32, 90, 45, 77)
    asks = [replace(compose(SYSTEM, [LIBRARY[0], chunk], [9]), max_tokens=230) for chunk in chunks]
    answers = small.play(asks, [0] * 6, [None] * 6)
    small.call(take, most=None)
    at_rest(small)
    resumed = [pair for pair in zip(asks, answers, strict=True) if not pair[1].is_composed]
    assert small.call("preemptions") and resumed, "nothing was preempted, so this test says nothing"
    for ask, answer in resumed:
        assert len(answer.tokens) == 230
        rest = replace(ask.plain, token_ids=(*ask.token_ids, *answer.tokens[:-3]), max_tokens=3)
        end = replace(answer, token_ids=[answer.tokens[-3:]], logprobs=[answer.logprobs[0][-3:]])
        assert difference(end, vllm_engine("llama", plugin=False).ask(rest)) < CLOSE
