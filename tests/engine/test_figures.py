"""The figures of an engine: as of its last step, whatever it does at the moment."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from support.async_engines import RunnerThatFails, read, running, until
from support.engines import GREEDY, RecordingRunner, build_engine
from support.loaded import loaded_family

from kvmosaic.engine.figures import take_figures
from kvmosaic.errors import EngineError
from kvmosaic.prompt import Prompt

SYSTEM = [1, 2, 3, 4, 5, 6]
DOCUMENTS = [[(7 * index + place) % 128 for place in range(19 + index)] for index in range(6)]


def ask(*numbers, tenant=""):
    prompt = Prompt.from_tokens(SYSTEM, [DOCUMENTS[number] for number in numbers], [7, 8, 9])
    return prompt if not tenant else Prompt(prompt.segments, prompt.salt, tenant=tenant)


class RunnerThatIsHeld(RecordingRunner):
    """Forwards stop until they are let go, once `holds` is set."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.holds, self.reached, self.release = False, threading.Event(), threading.Event()

    def run(self, spans):
        if self.holds:
            self.reached.set()
            assert self.release.wait(60)
        return super().run(spans)


def test_a_long_step_leaves_the_figures_as_of_the_last_one():
    inner = build_engine(loaded_family("llama"), runner=RunnerThatIsHeld)

    async def main():
        async with running(inner) as engine:
            await read(engine, ask(0, 1, tenant="acme"))
            before = engine.figures
            assert before.usages["acme"].num_chunks == 2 and before.num_running == {}
            inner.runner.holds = True
            reading = asyncio.create_task(read(engine, ask(2, tenant="zenith")))
            await until(inner.runner.reached.is_set)
            begin = time.thread_time()
            held = engine.figures
            age = engine.figures_age_seconds
            assert time.thread_time() - begin < 0.05
            assert held.caches == before.caches and held.usages == before.usages
            await asyncio.sleep(0.02)
            assert engine.figures is held and engine.figures_age_seconds > age
            inner.runner.holds = False
            inner.runner.release.set()
            await reading
            assert engine.figures.usages["zenith"].num_chunks == 1
            assert set(before.usages) == {"acme"}, "what was published is not changed later"

    asyncio.run(main())


def test_figures_are_there_before_the_news_of_what_has_changed_them():
    async def main():
        async with running(build_engine(loaded_family("llama"))) as engine:
            for number in range(6):
                await read(engine, ask(number, tenant="acme"))
                assert engine.figures.caches.cached_chunks == number + 1
                assert engine.figures.num_running == {}
            async for delta in engine.generate(ask(0, tenant="acme"), GREEDY):
                assert delta.finished or engine.figures.num_running == {"acme": 1}
                break
            await until(lambda: engine.figures.num_running == {})
            await engine.call(lambda inner: inner.kv_cache.set_quota("acme", 1_000))
            assert engine.figures.usages["acme"].quota_bytes == 1_000
            await engine.call(lambda inner: inner.kv_cache.reset())
            assert engine.figures.caches.cached_chunks == 0 and engine.figures.usages["acme"].num_chunks == 0

    asyncio.run(main())


def test_idle_figures_do_not_grow_old():
    async def main():
        async with running(build_engine(loaded_family("llama"))) as engine:
            await read(engine, ask(0))
            await until(lambda: engine.figures_age_seconds == 0.0)
            await asyncio.sleep(0.05)
            assert engine.figures_age_seconds == 0.0

    asyncio.run(main())


def test_a_failed_step_and_the_end_of_the_engine_are_in_the_figures():
    inner = build_engine(loaded_family("llama"), runner=RunnerThatFails)
    inner.runner.failing = range(1)

    async def main():
        async with running(inner) as engine:
            with pytest.raises(EngineError):
                await read(engine, ask(0, tenant="acme"))
            assert engine.figures.usages == {} and engine.figures.num_running == {}
            await read(engine, ask(0, tenant="acme"))
            await engine.close()
            assert engine.figures.usages["acme"].num_chunks == 1

    asyncio.run(main())


def test_taking_figures_costs_the_same_with_a_thousand_tenants():
    engine = build_engine(loaded_family("llama"))
    for number in range(1_000):
        engine.kv_cache.set_quota(f"tenant-{number}", 1)
    first = take_figures(engine)
    assert len(first.usages) == 1_000
    assert take_figures(engine).usages is first.usages, "nothing has changed, and nothing is looked at"
    engine.kv_cache.set_quota("tenant-1", 2)
    second = take_figures(engine)
    assert second.usages is not first.usages
    assert [name for name in second.usages if second.usages[name] is not first.usages[name]] == ["tenant-1"]
    engine.kv_cache.set_quota("tenant-1", None)
    assert len(take_figures(engine).usages) == 999
