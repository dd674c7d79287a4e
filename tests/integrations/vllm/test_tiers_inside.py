"""Chunks that left vLLM's prefix cache come back from tiers, in engines of their own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.redis import RedisServer
from support.vllm import tiers
from support.vllm.asking import Answer, Ask, compose, difference, documents
from support.vllm.forking import CONNECTOR, ForkedEngine

SYSTEM, *DOCUMENTS, QUESTION = documents(1, 50, 100, 77, 64, 9)
FIRST, SECOND, THIRD = DOCUMENTS
MAX_PADDING = 31
"""Of each chunk prompt; vLLM computes at least one token of it."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tiers")
    redis = RedisServer(folder)
    yield {"folder": folder, "disk": f"disk:{folder}/disk?quota=1GiB", "redis": f"unix://{redis.socket}?timeout=5"}
    redis.close()


def with_tiers(*urls: str, **extra: Any) -> dict[str, Any]:
    return {**CONNECTOR, "kv_connector_extra_config": {"tiers": list(urls), "loading": "always", **extra}}


@pytest.fixture(scope="module")
def engine(vllm_engine: Callable[..., ForkedEngine], places: dict[str, Any]) -> ForkedEngine:
    return vllm_engine("llama", kv_transfer_config=with_tiers("host:64MiB", places["disk"], places["redis"]))


@pytest.fixture(scope="module")
def narrow(vllm_engine: Callable[..., ForkedEngine], places: dict[str, Any]) -> ForkedEngine:
    """Another engine with the same Redis, few blocks, and hardly room for what is fetched."""
    transfer = with_tiers("host:16MiB", places["redis"], staged="200KiB")
    return vllm_engine("llama", kv_transfer_config=transfer, num_gpu_blocks_override=48)


def ask(engine: ForkedEngine, *asks: Ask) -> tuple[list[Answer], int]:
    """Answers, and the tokens that were computed for them."""
    said = engine.call(tiers.answer, asks=[each.to_json() for each in asks])
    return [Answer(**each) for each in said["answers"]], said["computed"]


def sources(answer: Answer) -> list[str | None]:
    return [row["tier"] for row in answer.report["documents"]]


def little(num_chunks: int, prompt: Ask) -> int:
    """Most tokens that are computed when no chunk is: padding, the question, and the answer but for its last token."""
    return num_chunks * MAX_PADDING + prompt.question + prompt.max_tokens - 1


def test_chunks_come_back_from_every_tier_as_they_were(engine):
    prompt = compose(SYSTEM, DOCUMENTS, QUESTION)
    (fresh,), _ = ask(engine, prompt)
    assert sources(fresh) == [None, None, None]
    for left, expected in (([], "host"), (["host"], "disk"), (["host", "disk"], "redis")):
        engine.call(tiers.forget, tiers=left)
        (again,), computed = ask(engine, prompt)
        assert sources(again) == [expected] * 3
        assert "loaded from" in again.report["documents"][0]["note"]
        assert computed <= little(3, prompt)
        assert difference(again, fresh) < 1e-5
        assert again.token_ids == fresh.token_ids
    state = engine.call(tiers.settle)
    assert not state["leaked"] and not state["staged"] and not state["stats"]["invalid"]


def test_what_came_from_a_slow_tier_is_in_the_fast_one_and_in_the_prefix_cache_afterwards(engine):
    prompt = compose(SYSTEM, DOCUMENTS, QUESTION)
    ask(engine, prompt)
    engine.call(tiers.forget, tiers=["host"])
    (slow,), _ = ask(engine, prompt)
    (moved,), _ = ask(engine, compose(SYSTEM, DOCUMENTS[::-1], QUESTION))
    engine.call(tiers.forget, tiers=[])
    (fast,), _ = ask(engine, prompt)
    assert sources(slow)[0] in ("disk", "redis")
    assert [sources(each)[0] for each in (moved, fast)] == ["device", "host"]


@pytest.mark.parametrize("how", [{"chunk_context": "none"}, {"position_strategy": "shared"}])
def test_every_kind_of_composition_loads_the_chunks_it_stored(engine, how):
    prompt = compose(SYSTEM, [SECOND, THIRD], QUESTION, **how)
    (fresh,), _ = ask(engine, prompt)
    engine.call(tiers.forget, tiers=[])
    (again,), computed = ask(engine, prompt)
    assert sources(again) == ["host", "host"]
    assert computed <= little(3, prompt)
    assert difference(again, fresh) < 1e-5


def test_an_ordinary_prompt_after_loaded_chunks_is_answered_as_before(engine):
    prompt = compose(SYSTEM, [FIRST, SECOND], QUESTION)
    engine.call(tiers.forget, tiers=[])
    (before,), _ = ask(engine, prompt.plain)
    engine.call(tiers.forget, tiers=[])
    ask(engine, prompt)
    engine.call(tiers.forget, tiers=[])
    (composed,), _ = ask(engine, prompt)
    (after,), _ = ask(engine, prompt.plain)
    assert sources(composed) == ["host", "host"]
    assert after.num_cached_tokens >= len(SYSTEM) // 32 * 32  # it uses blocks that were loaded
    assert difference(after, before) < 1e-5


def test_another_salt_and_another_system_text_find_nothing(engine):
    ask(engine, compose(SYSTEM, [FIRST], QUESTION))
    engine.call(tiers.forget, tiers=[])
    salted = Ask(**{**vars_of(compose(SYSTEM, [FIRST], QUESTION)), "cache_salt": "someone"})
    (other, elsewhere), _ = ask(engine, salted, compose(SECOND, [FIRST], QUESTION))
    assert sources(other) == sources(elsewhere) == [None]


def vars_of(prompt: Ask) -> dict[str, Any]:
    return {name: getattr(prompt, name) for name in prompt.__dataclass_fields__}


@pytest.mark.parametrize(("connector", "factor"), [(False, 2.0), (True, 4.0)])
def test_other_weights_find_nothing_and_the_same_weights_everything(engine, connector, factor):
    prompt = compose(SYSTEM, DOCUMENTS, QUESTION)
    (first,), _ = ask(engine, prompt)
    engine.call(tiers.forget, tiers=[], connector=connector)
    engine.call(tiers.change_weights, factor=factor)
    try:
        (changed,), _ = ask(engine, prompt)
    finally:
        engine.call(tiers.forget, tiers=[], connector=connector)
        engine.call(tiers.change_weights, factor=1 / factor)  # exact
    (back,), _ = ask(engine, prompt)
    assert sources(changed) == [None] * 3
    assert sources(back) == ["host"] * 3
    assert difference(back, first) < 1e-5


def test_a_damaged_entry_is_computed_again(engine, places):
    prompt = compose(SYSTEM, documents(5, 70, 90), QUESTION)
    (fresh,), _ = ask(engine, prompt)
    engine.call(tiers.forget, tiers=["host", "redis"])
    files = list(Path(places["folder"]).glob("disk/??/*.safetensors"))
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    before = engine.call(tiers.settle)["stats"]["invalid"]
    (again,), _ = ask(engine, prompt)
    assert sources(again) == [None, None]
    assert difference(again, fresh) < 1e-5
    assert engine.call(tiers.settle)["stats"]["invalid"] > before


def test_who_needs_no_tier_does_not_wait_for_one_that_hangs(engine):
    prompt = compose(SYSTEM, [FIRST, SECOND], QUESTION)
    (fresh,), _ = ask(engine, prompt)
    engine.call(tiers.forget, tiers=[])
    (other,) = documents(7, 40)
    early, answers = engine.call(
        tiers.play_while_hanging, asks=[prompt.to_json(), Ask(tuple(other)).to_json()], plain=1
    )
    assert early == [1]
    assert difference(Answer(**answers[0]), fresh) < 1e-5


def test_cancelled_requests_leave_nothing_behind(engine):
    prompts = [compose(SYSTEM, [chunk, FIRST], QUESTION) for chunk in documents(9, *[60] * 6)]
    ask(engine, *prompts)
    engine.call(tiers.forget, tiers=[])
    asks = [prompt.to_json() for prompt in prompts]
    engine.call("play", asks=asks, at=[0] * 6, abort=[0, 1, 2, 3, 4, None])
    state = engine.call(tiers.settle)
    assert not state["leaked"] and not state["staged"]


def test_another_process_computes_nothing_that_the_first_one_stored(engine, narrow):
    prompt = compose(SYSTEM, DOCUMENTS, QUESTION)
    (theirs,), _ = ask(engine, prompt)
    engine.call(tiers.settle)
    (ours,), computed = ask(narrow, prompt)
    assert sources(ours) == ["redis"] * 3
    assert computed <= little(3, prompt)
    assert difference(ours, theirs) < 1e-5


def test_a_crowd_with_few_blocks_and_little_room_is_answered_as_one_by_one(narrow):
    draw = random.Random(3)
    chunks = documents(4, *(draw.randrange(20, 120) for _ in range(10)))
    prompts = [compose(SYSTEM, draw.sample(chunks, draw.randrange(1, 5)), QUESTION) for _ in range(24)]
    alone = [ask(narrow, prompt)[0][0] for prompt in prompts]
    at = [index // 4 for index in range(24)]
    abort = [index + 5 if index % 3 == 0 else None for index in range(24)]
    answers = narrow.call("play", asks=[prompt.to_json() for prompt in prompts], at=at, abort=abort)
    for one, other in zip(alone, answers, strict=True):
        if other is not None:
            assert difference(one, Answer(**other)) < 1e-4
    state = narrow.call(tiers.settle)
    assert not state["leaked"] and not state["staged"]


def test_latent_rows_come_back_bit_for_bit(vllm_engine):
    assert vllm_engine("deepseek").call(tiers.stored_and_loaded) == [True] * 4
