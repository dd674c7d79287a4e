"""Composed prompts around vLLM's sleep: what sleeps computes nothing, and what it forgot is computed again."""

from __future__ import annotations

from typing import Any

import pytest
from support.vllm.asking import Answer, compose, difference, documents

from kvmosaic.vllm.check import _composing

CLOSE = 1e-4
SYSTEM, A, B, QUESTION = documents(21, 37, 70, 45, 12)


def sleep_and_wake(engine: Any, ask: dict[str, Any], level: int, known: bool) -> dict[str, Any]:
    """Asks while the engine sleeps, looks what it says meanwhile, wakes it, and waits for the answer.

    Workers on a CPU cannot give memory back, so from level 1 on a stand-in does to the cache what a GPU does to it:
    what was there is gone.
    """
    from support.vllm.inside import _said, prompt_and_params, state

    if not known:
        engine.llm.reset_prefix_cache()
    executor = engine.core.model_executor
    executor.sleep = lambda level: [cache.fill_(float("nan")) for cache in caches()]
    executor.wake_up = lambda tags: None
    engine.core.sleep(level)
    prompt, params = prompt_and_params(ask)
    engine.engine.add_request("asleep", prompt, params)
    meanwhile = []
    for _ in range(5):
        meanwhile += engine.engine.step()
    engine.core.wake_up(None if level else ["scheduling"])
    for cache in caches() if level else []:
        cache.zero_()  # the memory that vLLM gets back is not what was there
    for _ in range(100):
        for output in engine.engine.step():
            if output.finished:
                del executor.sleep, executor.wake_up
                return {"meanwhile": len(meanwhile), "answer": _said(output), "requests": state(engine)["requests"]}
    raise AssertionError(f"no answer after sleep: {state(engine)}")


def caches() -> list[Any]:
    """The paged caches of this worker."""
    config, _ = _composing().configuration
    layers = config.compilation_config.static_forward_context
    places = _composing().places
    assert places is not None
    return [layers[place.name].kv_cache for place in places.layers]


@pytest.mark.parametrize("known", [True, False], ids=["known documents", "new documents"])
@pytest.mark.parametrize("level", [0, 1])
def test_a_prompt_that_came_in_its_sleep_is_answered_as_ever(vllm_engine: Any, level: int, known: bool) -> None:
    engine = vllm_engine("llama")
    ask = compose(SYSTEM, [A, B], QUESTION)
    expected = engine.ask(ask)
    said = engine.call(sleep_and_wake, ask=ask.to_json(), level=level, known=known)
    assert said["meanwhile"] == 0 and not said["requests"]
    answer = Answer(**said["answer"])
    assert answer.is_composed and difference(expected, answer) < CLOSE
    actions = {row["action"] for row in answer.report["documents"]}
    assert ("computed" in actions) == (level == 1 or not known)
