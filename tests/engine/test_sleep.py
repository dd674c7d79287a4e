"""A sleeping engine holds no device memory, and wakes as if nothing had happened."""

from __future__ import annotations

import pytest
import torch
from support.engines import GREEDY, build_engine, fragment
from support.families import build
from support.loaded import random_prompt

from kvmosaic.engine import Engine
from kvmosaic.errors import EngineAsleep, EngineStopped, InvalidConfig
from kvmosaic.model import LoadedModel


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float64))


@pytest.fixture
def engine(model: LoadedModel) -> Engine:
    return build_engine(model)


def device_bytes(engine: Engine) -> int:
    """Of the tensors of both pools."""
    storages = engine.runner.storages.values()
    return sum(tensor.numel() for storage in storages for tensor in (*storage._keys, *storage._values))


def ask(engine: Engine, seed: int = 0):
    request = engine.add_request(random_prompt(seed), GREEDY)
    engine.run([request])
    engine.check_invariants()
    return request.output()


def fall_asleep(engine: Engine, level: int = 1, **options: bool) -> None:
    engine.sleep(level, **options)
    while engine.has_work:
        engine.step()
    assert engine.is_asleep and device_bytes(engine) == 0


@pytest.mark.parametrize("is_fragmented", [False, True])
def test_chunks_and_prefixes_survive_level_one(engine, is_fragmented) -> None:
    if is_fragmented:
        fragment(engine)
    expected = ask(engine)
    size = device_bytes(engine)
    fall_asleep(engine)
    engine.wake()
    assert device_bytes(engine) == size
    found = ask(engine)
    assert found.outputs == expected.outputs
    assert engine.kv_cache.statistics().computed_tokens == 9 + 4 + 12, "no chunk was computed twice"


def test_level_two_drops_everything(engine) -> None:
    expected = ask(engine)
    fall_asleep(engine, 2)
    assert not engine.kv_cache.chunks()
    engine.wake()
    assert ask(engine).outputs == expected.outputs
    assert engine.kv_cache.statistics().computed_tokens == 2 * (9 + 4 + 12)


def test_what_runs_ends_first_and_what_comes_waits(engine) -> None:
    first = engine.add_request(random_prompt(0), GREEDY)
    engine.step()
    engine.sleep()
    second = engine.add_request(random_prompt(1), GREEDY)
    while engine.has_work:
        engine.step()
    assert first.is_finished and engine.is_asleep
    assert not second.is_finished and engine.has_unfinished_requests and engine.step() == []
    engine.wake()
    engine.run([second])
    assert second.is_finished and second.error is None


def test_a_sleeper_may_refuse(engine) -> None:
    fall_asleep(engine, refuse=True)
    with pytest.raises(EngineAsleep, match=r"sleeps \(level 1\).*wake it first"):
        engine.add_request(random_prompt(), GREEDY)
    engine.wake()
    ask(engine)


def test_waking_and_sleeping_twice_is_safe(engine) -> None:
    engine.wake()
    fall_asleep(engine)
    fall_asleep(engine, 2)
    engine.wake()
    engine.wake()
    ask(engine)


def test_a_waiting_request_may_be_aborted_asleep(engine) -> None:
    fall_asleep(engine)
    request = engine.add_request(random_prompt(), GREEDY)
    engine.abort(request.request_id)
    engine.wake()
    engine.check_invariants()
    assert not engine.has_unfinished_requests


def test_without_memory_it_sleeps_on_and_wakes_later(engine, monkeypatch) -> None:
    expected = ask(engine)
    fall_asleep(engine)
    storage = engine.runner.storages["chunk_cache"]
    allocate = storage._allocate

    def fail(num_slots: int) -> None:
        if num_slots:
            raise torch.OutOfMemoryError("no memory")
        allocate(num_slots)

    monkeypatch.setattr(storage, "_allocate", fail)
    with pytest.raises(torch.OutOfMemoryError):
        engine.wake()
    assert engine.is_asleep and engine.step() == []
    monkeypatch.undo()
    engine.wake()
    assert ask(engine).outputs == expected.outputs


@pytest.mark.parametrize("level", [0, 3, -1, "1", None])
def test_other_levels_are_refused(engine, level) -> None:
    with pytest.raises(InvalidConfig, match="level 1"):
        engine.sleep(level)
    assert not engine.has_work


def test_a_closed_engine_does_not_sleep(engine) -> None:
    engine.close()
    with pytest.raises(EngineStopped):
        engine.sleep()


def test_cold_chunks_leave_and_warm_ones_stay(model) -> None:
    now = [0.0]
    engine = build_engine(model)
    engine.kv_cache._clock = engine.kv_cache._chunks._clock = lambda: now[0]
    ask(engine, 0)
    ask(engine, 0)
    now[0] = 100.0
    ask(engine, 1)
    assert engine.kv_cache.evict_cold(5, 50.0) == 3
    assert engine.kv_cache.evict_cold(1, 0.0) == 3
    assert engine.kv_cache.evict_cold(5, 0.0) == 0 and not engine.kv_cache.chunks()
    with pytest.raises(InvalidConfig, match="idle_seconds"):
        engine.kv_cache.evict_cold(1, -1.0)
