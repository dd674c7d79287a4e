"""Engines on threads, with what tests ask of them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from kvmosaic.engine import AsyncEngine, Engine, RequestDelta
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams
from support.engines import GREEDY, RecordingRunner


class RunnerThatFails(RecordingRunner):
    """A fake of a device that breaks: fails in the middle of the forwards with these numbers (from 0)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.failing: Any = ()
        self.num_runs = 0

    def run(self, spans: Any) -> torch.Tensor:
        self.num_runs += 1
        if self.num_runs - 1 in self.failing:
            super().run(spans[:1])
            raise RuntimeError("the device is gone")
        return super().run(spans)


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[AsyncEngine]:
    """The engine on its thread; in the end nothing but the cache may hold a block."""
    started = AsyncEngine(engine)
    started.start()
    try:
        yield started
        end, thread = time.monotonic() + 20, started._thread
        while not thread._has_ended and (thread._commands or thread._closed or engine.has_unfinished_requests):
            assert time.monotonic() < end, "something is still under way"
            await asyncio.sleep(0.01)
    finally:
        await asyncio.wait_for(started.close(), 120)
    assert_only_the_cache_holds_blocks(engine)


def assert_only_the_cache_holds_blocks(engine: Engine) -> None:
    """Every block is free or held by the cache alone."""
    assert not engine.has_unfinished_requests
    assert not len(engine.scheduler.waiting) and not engine.scheduler.running
    engine.check_invariants()
    kv_cache = engine.kv_cache
    for pool in (kv_cache.request_pool, kv_cache.chunk_pool):
        assert pool.num_shared == 0
    kv_cache.reset()
    assert kv_cache.request_pool.num_used == 0 and kv_cache.chunk_pool.num_used == 0


async def read(engine: AsyncEngine, prompt: Prompt, params: SamplingParams = GREEDY, **options: Any) -> list[int]:
    """The tokens of the first answer, put together from the deltas."""
    return tokens([delta async for delta in engine.generate(prompt, params, **options)])


def tokens(deltas: list[RequestDelta], index: int = 0) -> list[int]:
    """The tokens of one answer."""
    answers = [answer for delta in deltas for answer in delta.answers if answer.index == index]
    return [token for answer in answers for token in answer.token_ids]


@asynccontextmanager
async def held(engine: AsyncEngine) -> AsyncIterator[None]:
    """Keeps the engine's thread between two steps for as long as the block lasts."""
    reached, release = threading.Event(), threading.Event()

    def hold(_: Engine) -> None:
        reached.set()
        release.wait(20)

    task = asyncio.create_task(engine.call(hold))
    try:
        await until(reached.is_set)
        yield
    finally:
        release.set()
    await task


async def until(condition: Any, seconds: float = 120) -> None:
    """Waits for something that the engine's thread brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        await asyncio.sleep(0.002)
