"""Prompts of many documents: what grows with documents times rows is bounded, and what is left out is said."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest
from support.server import loaded_reader

from kvmosaic import LLM, ChunkCacheConfig, SamplingParams
from kvmosaic.engine import request_repair, scheduler, step
from kvmosaic.engine.step import Step
from kvmosaic.errors import InvalidRepair

QUESTION = [{"role": "user", "content": "Where does the ferry go?"}]


def documents(count: int) -> list[dict[str, Any]]:
    """They are not alike."""
    return [{"text": "".join(Random(number).choices("abcdefghijklmnopqrstuvwxyz ", k=10))} for number in range(count)]


def answer(count: int, repair: str | None = None, **config: Any) -> Any:
    llm = LLM(loaded_reader(), chunk_cache_config=ChunkCacheConfig(**config), self_check=False)
    params = SamplingParams(max_tokens=4, temperature=0, repair=repair)
    (output,) = llm.chat(QUESTION, params, documents=documents(count), position_strategy="sequential")
    return output


def test_the_default_repair_is_left_out_where_there_are_too_many_documents() -> None:
    output = answer(request_repair.MAX_REPAIRED_DOCUMENTS + 1)
    assert output.reuse.repair is None or output.reuse.repair.repaired_tokens == 0
    assert answer(2).reuse.repair.repaired_tokens


def test_a_repair_that_was_asked_for_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRepair, match=r"this prompt has 257; at most 256 can be repaired"):
        answer(257, "first(8)")


def test_tokens_times_documents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_repair, "MAX_REPAIR_LOOKS", 100)
    with pytest.raises(InvalidRepair, match=r"repairs 27 tokens, each of which looks at 10 documents; .* may be 100"):
        answer(10, "first(3)")


@pytest.mark.parametrize("repair", ["none", "first(4)", "query(0.3)"])
def test_steps_of_few_rows_give_the_same_answer(repair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answer(12, repair)
    looks: list[Step] = []
    schedule = scheduler.Scheduler.schedule

    def watched(self: scheduler.Scheduler) -> Step:
        looks.append(schedule(self))
        return looks[-1]

    monkeypatch.setattr(step, "MAX_STEP_LOOKS", 64)
    monkeypatch.setattr(scheduler.Scheduler, "schedule", watched)
    output = answer(12, repair)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert max(step.num_looks for step in looks) <= 64
    assert sum(bool(step.works) for step in looks) > 6


def test_four_thousand_documents_take_seconds_not_minutes() -> None:
    begin = time.process_time()
    llm = LLM(loaded_reader(), self_check=False)
    prompt = llm.compose(QUESTION, documents=documents(4_096))
    layout = llm.engine.arrange(prompt, "shared")
    llm.engine.kv_cache.plan(layout, "", "")
    assert time.process_time() - begin < 5
