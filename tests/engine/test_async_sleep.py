"""A sleeping engine on its thread: nobody is lost, nothing spins, and whoever waits is told."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
import torch
from support.async_engines import held, read, running, until
from support.engines import GREEDY, build_engine
from support.families import build
from support.loaded import random_prompt

from kvmosaic.engine import AsyncEngine
from kvmosaic.errors import EngineAsleep, EngineError, EngineStopped, InvalidConfig
from kvmosaic.model import LoadedModel

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return LoadedModel.from_module(build("llama", torch.float64))


async def test_requests_wait_through_the_sleep_and_are_answered_the_same(model) -> None:
    async with running(build_engine(model)) as engine:
        expected = await read(engine, random_prompt(0))
        assert await engine.sleep(1) is True
        assert engine.is_asleep
        waiting = [asyncio.create_task(read(engine, random_prompt(0))) for _ in range(3)]
        await until(lambda: engine.num_waiting == 3)
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        await engine.wake()
        assert await asyncio.gather(*waiting) == [expected] * 3 and not engine.is_asleep


async def test_a_request_under_way_ends_before_the_engine_sleeps(model) -> None:
    async with running(build_engine(model)) as engine:
        deltas = engine.generate(random_prompt(0), GREEDY)
        seen = [await anext(deltas)]  # on a busy machine it may be all
        asleep = asyncio.create_task(engine.sleep(2))
        seen += [delta async for delta in deltas]
        assert seen[-1].finished and await asleep
        await engine.wake()


async def test_a_sleeper_that_refuses_says_so(model) -> None:
    async with running(build_engine(model)) as engine:
        await engine.sleep(refuse=True)
        assert engine.refuses
        with pytest.raises(EngineAsleep):
            await read(engine, random_prompt(0))
        assert await engine.sleep(refuse=False) and not engine.refuses
        await engine.wake()
        assert not engine.refuses and await read(engine, random_prompt(0))


async def test_other_levels_are_refused(model) -> None:
    async with running(build_engine(model)) as engine:
        with pytest.raises(InvalidConfig, match="level 1"):
            await engine.sleep(3)
        assert not engine.is_asleep


async def test_a_reader_who_leaves_while_it_sleeps_frees_its_place_at_once(model) -> None:
    built = build_engine(model)
    async with running(built) as engine:
        await engine.sleep()
        waiting = asyncio.create_task(read(engine, random_prompt(0)))
        await until(lambda: engine.num_waiting == 1)
        waiting.cancel()
        await until(lambda: not built.has_unfinished_requests)
        assert engine.is_asleep
        await engine.wake()


async def test_whoever_stops_waiting_does_not_keep_it_awake(model) -> None:
    async with running(build_engine(model)) as engine:
        deltas = engine.generate(random_prompt(0), GREEDY)
        seen = [await anext(deltas)]  # on a busy machine it may be all
        async with held(engine):
            asleep = asyncio.create_task(engine.sleep())
            await asyncio.sleep(0.01)
            asleep.cancel()
            await asyncio.sleep(0.01)
        seen += [delta async for delta in deltas]
        assert seen[-1].finished
        assert not engine.is_asleep, "cancelled before its turn, the wish was taken back"
        deltas = engine.generate(random_prompt(0), GREEDY)
        seen = [await anext(deltas)]  # on a busy machine it may be all
        asleep = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0)
        await engine.call(lambda _: None)  # it had its turn
        asleep.cancel()
        seen += [delta async for delta in deltas]
        assert seen[-1].finished
        await until(lambda: engine.is_asleep)
        await engine.wake()


async def test_woken_before_it_slept_the_sleeper_is_told(model) -> None:
    async with running(build_engine(model)) as engine:
        deltas = engine.generate(random_prompt(0), GREEDY)
        seen = [await anext(deltas)]  # on a busy machine it may be all
        async with held(engine):  # both wishes get their turn between the same two steps
            asleep = asyncio.create_task(engine.sleep())
            await asyncio.sleep(0.01)
            waking = asyncio.create_task(engine.wake())
            await asyncio.sleep(0.01)
        await waking
        assert await asleep is False and not engine.is_asleep
        seen += [delta async for delta in deltas]
        assert seen[-1].finished


async def test_nothing_spins_while_it_sleeps_not_even_after_failures(model) -> None:
    built = build_engine(model)
    async with running(built) as engine:
        await engine.sleep()
        await engine.call(lambda _: None)
        thread = engine._thread
        waiting = asyncio.create_task(read(engine, random_prompt(0)))
        await until(lambda: engine.num_waiting == 1)
        for failure in (None, "5 steps in a row failed (RuntimeError)"):
            thread.failure = failure
            await engine.call(lambda _: None)
            gc.collect()  # not while it is measured
            begin = time.process_time()
            await asyncio.sleep(0.5)
            assert time.process_time() - begin < 0.25
            assert len(built.unfinished_requests) == 1, "no trial is made"
        await engine.wake()
        assert await waiting and engine.failure is None


async def test_without_memory_it_sleeps_on_and_wakes_later(model, monkeypatch) -> None:
    built = build_engine(model)
    async with running(built) as engine:
        await engine.sleep()

        def fail() -> None:
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as broken:
            broken.setattr(built.runner, "wake", fail)
            with pytest.raises(EngineAsleep, match=r"could not wake \(OutOfMemoryError\)"):
                await engine.wake()
            assert engine.is_asleep and engine.is_healthy
        await engine.wake()
        assert await read(engine, random_prompt(0))


async def test_an_engine_that_cannot_fall_asleep_goes_on_and_fails_no_request(model, monkeypatch) -> None:
    built = build_engine(model)
    async with running(built) as engine:

        def fail(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(built.runner, "sleep", fail)
        deltas = engine.generate(random_prompt(0), GREEDY)
        first = await anext(deltas)
        asleep = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0)
        later = asyncio.create_task(read(engine, random_prompt(1)))
        assert [first, *[delta async for delta in deltas]][-1].finished
        with pytest.raises(EngineError, match="could not fall asleep"):
            await asleep
        assert await later and engine.is_healthy and not engine.is_asleep


async def test_stopping_a_sleeper_tells_everyone(model) -> None:
    engine = AsyncEngine(build_engine(model))
    engine.start()
    await engine.sleep()
    waiting = asyncio.create_task(read(engine, random_prompt(0)))
    await until(lambda: engine.num_waiting == 1)
    await engine.call(lambda _: None)  # the request is no longer a queued command
    await asyncio.wait_for(engine.close(), 120)
    assert await waiting == []
    with pytest.raises(EngineStopped):
        await engine.sleep()
    with pytest.raises(EngineStopped):
        await engine.wake()
