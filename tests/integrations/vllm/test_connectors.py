"""Our connector beside others in a MultiConnector: composed keys and values reach no ordinary prompt."""

from __future__ import annotations

import json
import logging
import random
import re
from dataclasses import replace

import pytest
from support.vllm import metering, neighbours
from support.vllm.asking import compose, difference, documents
from support.vllm.neighbours import OFFLOADING, SPEAKING, beside, other
from support.vllm.serving import ForkedServer

CLOSE = 1e-4
SYSTEM, *LIBRARY, QUESTION = documents(90, 50, 83, 64, 131, 70, 21)


def loaded(engine):
    """Blocks that the offloading connector loaded so far."""
    return sum(neighbours.LOADED)


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_a_connector_that_names_tokens_nothing_is_composed(vllm_engine, tmp_path, ours_first):
    """Without their names, it would give blocks of a composed prompt to an ordinary one of the same tokens."""
    example = other("ExampleConnector", shared_storage_path=str(tmp_path))
    config = beside(example, ours_first=ours_first)
    engine = vllm_engine("llama", kv_transfer_config=config, disable_hybrid_kv_cache_manager=True)
    ask = compose(SYSTEM, LIBRARY[:3], QUESTION)
    expected = vllm_engine("llama", plugin=False).ask(ask.plain)
    answer = engine.ask(ask)
    assert "ExampleConnector" in answer.report["bypass"]
    engine.call("reset_prefix_cache")
    assert difference(answer, expected) < CLOSE
    assert difference(engine.ask(ask.plain), expected) < CLOSE


@pytest.mark.parametrize("ours_first", [True, False])
def test_the_handshake_of_another_connector_is_not_ours(vllm_engine, ours_first):
    engine = vllm_engine("llama", kv_transfer_config=beside(SPEAKING, ours_first=ours_first))
    ask = compose(SYSTEM, LIBRARY[:3], QUESTION)
    answer = engine.ask(ask)
    assert "SpeakingConnector" in answer.report["bypass"]
    assert difference(answer, vllm_engine("llama", plugin=False).ask(ask.plain)) < CLOSE


@pytest.mark.parametrize("how", [{}, {"position_strategy": "shared"}, {"position_strategy": "shared", "repair": 9}])
def test_documents_are_composed_beside_an_offloading_connector(vllm_engine, how):
    """Chunks that were evicted come back from it, and composed prompts stay apart from ordinary ones."""
    alone, bare = vllm_engine("llama"), vllm_engine("llama", plugin=False)
    engine = vllm_engine("llama", kv_transfer_config=beside(OFFLOADING), disable_log_stats=False)
    orders = ([0, 1, 2], [2, 0, 1], [2, 0, 1], [0, 1, 2, 3])
    asks = [replace(compose(SYSTEM, [LIBRARY[i] for i in order], QUESTION, **how), max_tokens=40) for order in orders]
    for _ in range(2):
        for ask in asks:
            answer = engine.ask(ask)
            assert answer.is_composed, answer.report
            assert difference(answer, alone.ask(ask)) < CLOSE
            assert difference(engine.ask(ask.plain), bare.ask(ask.plain)) < CLOSE
        before = engine.call(loaded)
        engine.call("reset_prefix_cache")
        answers = engine.generate(asks)
        assert engine.call(loaded) > before, "nothing was loaded, so this test says nothing"
        for ask, answer in zip(asks, answers, strict=True):
            assert answer.is_composed and difference(answer, alone.ask(ask)) < CLOSE


def test_behind_an_offloading_connector_nothing_is_composed(vllm_engine):
    engine = vllm_engine("llama", kv_transfer_config=beside(OFFLOADING, ours_first=False))
    ask = compose(SYSTEM, LIBRARY[:3], QUESTION)
    for _ in range(2):
        answer = engine.ask(ask)
        assert "list kvmosaic first" in answer.report["bypass"]
        assert difference(answer, vllm_engine("llama", plugin=False).ask(ask.plain)) < CLOSE
        engine.call("reset_prefix_cache")


def test_preempted_prompts_say_the_same_beside_it(vllm_engine):
    small = vllm_engine("llama", kv_transfer_config=beside(OFFLOADING), num_gpu_blocks_override=40)
    small.call("count_preemptions")
    chunks = documents(91, 37, 61, 32, 90, 45, 77)
    asks = [replace(compose(SYSTEM, [LIBRARY[0], chunk], [9]), max_tokens=230) for chunk in chunks]
    answers = small.play(asks, [0] * 6, [None] * 6)
    assert small.call("preemptions") > 0, "nothing was preempted, so this test says nothing"
    for ask, answer in zip(asks, answers, strict=True):
        assert answer.is_composed, answer.report
        assert difference(answer, vllm_engine("llama").ask(ask)) < CLOSE


def test_a_server_counts_and_logs_beside_it(vllm_model, caplog):
    """Its engine is another process, whose counts a MultiConnector finds by the class of the connector."""
    config = f"--kv-transfer-config={json.dumps(beside(OFFLOADING))}"
    with caplog.at_level(logging.INFO, logger="vllm"):  # vLLM's default, at which it logs the counts
        server = ForkedServer(vllm_model("llama"), config, plugin=False, environment={"VLLM_LOGGING_LEVEL": "INFO"})
    try:
        for order in ([0, 1], [1, 0]):
            ask = compose(SYSTEM, [LIBRARY[index] for index in order], QUESTION)
            assert ask.composition is not None
            reply = server.complete(list(ask.token_ids), kv_transfer_params=ask.composition.to_params())
            assert not reply["kv_transfer_params"]["kvmosaic"]["bypass"]
        metrics = server.http.get("/metrics").text
        counted = re.findall(r"^kvmosaic:composed_requests_total\{.*\} ([0-9.]+)$", metrics, re.MULTILINE)
        assert [float(number) for number in counted] == [2.0]
    finally:
        server.stop()


def test_a_crowd_in_little_room_says_what_each_says_alone_beside_it(vllm_engine):
    """Chunks evict each other, requests lose their blocks and come back: every report is true."""
    small = vllm_engine("llama", kv_transfer_config=beside(OFFLOADING), num_gpu_blocks_override=36)
    small.call("count_preemptions")
    draw = random.Random(3)
    asks = []
    for number in range(24):
        chosen = draw.sample(LIBRARY, draw.randint(1, 3))
        how = draw.choice([{}, {"repair": 5}, {"position_strategy": "shared", "repair": 5}])
        asks.append(replace(compose(SYSTEM, chosen, [7 + number], **how), max_tokens=draw.choice([5, 60, 150])))
    answers = small.play(asks, [draw.randint(0, 30) for _ in asks], [None] * len(asks))
    assert small.call("preemptions") > 0, "nothing was preempted, so this test says nothing"
    for ask, answer in zip(asks, answers, strict=True):
        expected = vllm_engine("llama").ask(ask if answer.is_composed else ask.plain)
        assert len(answer.tokens) == ask.max_tokens and difference(answer, expected) < CLOSE


def test_counts_reach_the_front_end_beside_it(vllm_engine):
    engine = vllm_engine("llama", kv_transfer_config=beside(OFFLOADING), disable_log_stats=False)
    ask = compose(SYSTEM, LIBRARY[:2], QUESTION)
    (answer,) = engine.play([ask], [0], [None])
    assert answer.is_composed, answer.report
    assert engine.call(metering.shown)["kvmosaic:composed_requests_total"] > 0
