"""The engine on its thread: deltas, cancelling at any point, errors that reach the right reader, an end to it all."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from support.async_engines import (
    RunnerThatFails,
    assert_only_the_cache_holds_blocks,
    held,
    read,
    running,
    tokens,
    until,
)
from support.engines import GREEDY, answer, build_engine, token_ids
from support.loaded import loaded_family

from kvmosaic.assembly import bundled_reader
from kvmosaic.engine import AsyncEngine
from kvmosaic.engine.engine_thread import MAX_FAILURES, TRIAL_SECONDS
from kvmosaic.engine.stream import wake_all
from kvmosaic.errors import (
    ChunkCacheFull,
    EngineError,
    EngineFailing,
    EngineStopped,
    InvalidPrompt,
    InvalidSampling,
    QueueFull,
    UnknownRequest,
)
from kvmosaic.model import load_model
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

SYSTEM = [1, 2, 3, 4, 5, 6]
DOCUMENTS = [[(7 * index + place) % 128 for place in range(9 + index)] for index in range(6)]
LONG = replace(GREEDY, max_tokens=3_000)
"""Seconds long, so that it is still under way when a test comes to it, also on a machine that is busy."""
ROOMY = (1_024, 128)
"""Blocks for a long answer."""
"""Longer than any test reads."""
POISON = 97


def llama():
    return loaded_family("llama")


def ask(*numbers, question=(7, 8, 9)):
    return Prompt.from_tokens(SYSTEM, [DOCUMENTS[number] for number in numbers], question)


def alone(prompt, params=GREEDY):
    return token_ids(answer(build_engine(llama()), prompt, params)[0])


@pytest.mark.parametrize("stop", [None, "e", "the"])
def test_deltas_joined_are_the_answer(stop):
    model = load_model(bundled_reader(), dtype="float32", device="cpu")
    prompt = Prompt.from_tokens(SYSTEM, DOCUMENTS[:2], [20, 21])
    params = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=40, logprobs=2, stop=stop)
    expected = answer(build_engine(model), prompt, params)[0].output().outputs

    async def main():
        async with running(build_engine(model)) as engine:
            return [delta async for delta in engine.generate(prompt, params)]

    deltas = asyncio.run(main())
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    for output in expected:
        parts = [part for delta in deltas for part in delta.answers if part.index == output.index]
        assert "".join(part.text for part in parts) == output.text
        assert tuple(token for part in parts for token in part.token_ids) == output.token_ids
        assert tuple(values for part in parts for values in part.logprobs) == output.logprobs
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [output.finish_reason]
        assert parts[-1].stop_reason == output.stop_reason
    assert [delta.reuse is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    inner = [False] * (len(deltas) - 2)
    assert [delta.metrics is not None for delta in deltas] == [True, *inner, *[True] * (len(deltas) > 1)]
    assert deltas[0].reuse.computed_tokens == deltas[0].num_prompt_tokens == len(SYSTEM) + 9 + 10 + 2
    times = [delta.time for delta in deltas]
    metrics = deltas[-1].metrics
    assert times == sorted(times)
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= times[0]
    assert metrics.finished_time <= times[-1]
    stages = [metrics.arrival_time, *metrics.plan, *metrics.lookup, metrics.first_scheduled_time]
    assert stages == sorted(stages) and metrics.load is None


def test_greedy_answers_are_the_same_alone_in_a_crowd_cold_and_warm():
    prompts = [ask(0, 1), ask(1, 0, 2), Prompt.plain([3, 1, 4]), ask(2, question=(9,)), ask(5, 4, 3, 2, 1, 0)]
    expected = [alone(prompt) for prompt in prompts]

    async def main():
        async with running(build_engine(llama(), max_batched_tokens=33)) as engine:
            cold = await asyncio.gather(*[read(engine, prompt) for prompt in prompts * 3])
            warm = await asyncio.gather(*[read(engine, prompt) for prompt in prompts])
            single = [await read(engine, prompt) for prompt in prompts]
        return cold, warm, single

    cold, warm, single = asyncio.run(main())
    assert (cold, warm, single) == (expected * 3, expected, expected)


@pytest.mark.parametrize("stage", ["sent", "waiting", "running"])
def test_a_cancelled_reader_gives_its_blocks_back_within_a_step(stage):
    inner = build_engine(llama(), max_running=1 if stage == "waiting" else 64, blocks=(2 * ROOMY[0], 128))

    async def cancelled_at(engine, reached):
        reader = asyncio.create_task(read(engine, ask(0, 1), LONG))
        await until(reached)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    async def main():
        async with running(inner) as engine, aclosing(engine.generate(Prompt.plain([1]), LONG)) as other:
            await anext(other)
            if stage == "sent":
                async with held(engine):
                    await cancelled_at(engine, lambda: engine.num_waiting)
            elif stage == "waiting":
                await cancelled_at(engine, lambda: engine.num_waiting)
            else:
                await cancelled_at(engine, lambda: engine.num_running == 2)
            left = await engine.call(lambda inner: inner.unfinished_requests)
            assert [len(request.token_ids) for request in left] == [1], "only the other one is still under way"
            assert (
                await engine.call(lambda inner: [chunk for chunk in inner.kv_cache.chunks() if chunk.ref_count]) == []
            )

    asyncio.run(main())


def test_a_generator_may_be_closed_before_during_and_after_its_answer():
    async def main():
        async with running(build_engine(llama(), blocks=ROOMY)) as engine:
            await engine.generate(ask(0), LONG).aclose()
            async with aclosing(engine.generate(ask(0), LONG)) as deltas:
                async for delta in deltas:
                    if delta.time:
                        break
            assert await engine.call(lambda inner: inner.unfinished_requests) == []
            ended = engine.generate(ask(0), GREEDY)
            assert tokens([delta async for delta in ended]) == alone(ask(0))
            await ended.aclose()

    asyncio.run(main())


def test_two_event_loops_read_from_one_engine():
    prompts = [ask(0, 1), ask(1, 0), Prompt.plain([3, 1, 4])]
    expected = [alone(prompt) for prompt in prompts]
    inner = build_engine(llama())
    engine = AsyncEngine(inner)
    engine.start()
    results = []

    async def read_all():
        return await asyncio.gather(*[read(engine, prompt) for prompt in prompts])

    threads = [threading.Thread(target=lambda: results.append(asyncio.run(read_all()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    engine.stop()
    assert results == [expected, expected]
    assert_only_the_cache_holds_blocks(inner)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_loop_that_was_closed_with_a_reader_on_it_leaves_nothing_behind(is_told):
    inner = build_engine(llama(), blocks=ROOMY)
    engine = AsyncEngine(inner)
    engine.start()
    loop = asyncio.new_event_loop()
    deltas = engine.generate(ask(0), LONG)
    loop.run_until_complete(anext(deltas))
    (request,) = inner.unfinished_requests
    if is_told:  # a wake-up lies in the loop, so there will be no other that could fail
        asyncio.run(until(lambda: request.answers[0].num_tokens > 9))
    loop.close()
    asyncio.run(until(lambda: not inner.has_unfinished_requests))
    assert request.answers[0].finish.reason == "abort"
    assert engine.is_alive and asyncio.run(read(engine, ask(0))) == alone(ask(0))
    engine.stop()
    assert_only_the_cache_holds_blocks(inner)
    del deltas
    gc.collect()


def count_wakes():
    """The sizes of the groups of streams in which the running loop is woken from now on."""
    loop, wakes = asyncio.get_running_loop(), []
    call_soon = loop.call_soon_threadsafe

    def counted(function, *args):
        if function is wake_all:
            wakes.append(len(args[0]))
        return call_soon(function, *args)

    loop.call_soon_threadsafe = counted
    return wakes


def test_a_slow_reader_gets_fewer_and_larger_deltas_and_one_wake_up():
    async def main():
        async with running(build_engine(llama())) as engine:
            deltas = engine.generate(ask(0), replace(GREEDY, max_tokens=60))
            read_ones, wakes = [await anext(deltas)], count_wakes()
            await until(lambda: not engine.num_running)
            assert len(wakes) <= 1
            read_ones += [delta async for delta in deltas]
            return read_ones

    deltas = asyncio.run(main())
    assert len(deltas) <= 3 and deltas[-1].finished  # read at first, on its way then, and all the rest
    assert tokens(deltas) == alone(ask(0), replace(GREEDY, max_tokens=60))


def test_a_loop_is_woken_at_most_once_per_step():
    async def main():
        wakes = count_wakes()
        inner = build_engine(llama(), runner=RunnerThatFails)
        async with running(inner) as engine:
            async with held(engine):
                tasks = [asyncio.create_task(read(engine, Prompt.plain([index]))) for index in range(20)]
                await asyncio.sleep(0)
            await asyncio.gather(*tasks)
        assert len(wakes) <= inner.runner.num_runs and max(wakes) == 20

    asyncio.run(main())


def test_failures_with_successes_between_them_do_not_stop_the_engine():
    inner = build_engine(llama(), runner=RunnerThatFails)

    async def main():
        async with running(inner) as engine:
            for _ in range(MAX_FAILURES):
                for _ in range(MAX_FAILURES - 1):
                    inner.runner.failing = {inner.runner.num_runs}
                    with pytest.raises(EngineError):
                        await read(engine, ask(0))
                assert await read(engine, ask(0)) == alone(ask(0))
            assert engine.is_alive

    asyncio.run(main())


def test_errors_of_the_queue_and_of_the_prompt_reach_their_reader_only():
    inner = build_engine(llama(), max_running=1, blocks=(1_024, 4), oversized_prompts="error")
    inner.config = replace(inner.config, max_waiting=1)

    async def main():
        async with running(inner) as engine, aclosing(engine.generate(ask(0), LONG, request_id="mine")) as first:
            await anext(first)
            with pytest.raises(InvalidPrompt, match="'mine' is under way"):
                await read(engine, ask(0), request_id="mine")
            with pytest.raises(InvalidSampling):
                await read(engine, ask(0), {"temperature": 0})
            waiting = asyncio.create_task(read(engine, ask(0)))
            await until(lambda: engine.num_waiting)
            with pytest.raises(QueueFull, match="1 requests wait already"):
                await read(engine, ask(0))
            await first.aclose()
            assert await waiting == alone(ask(0))
            with pytest.raises(ChunkCacheFull):
                await read(engine, ask(0, 1, 2))
            assert engine.is_alive and engine.failure is None

    asyncio.run(main())


# at first the second request waits for the document of the first one, and computes it when that one has ended
@pytest.mark.parametrize(("failing", "num_ended"), [(0, 1), (1, 2), (3, 2)])
def test_a_failed_step_ends_its_requests_and_no_others(failing, num_ended):
    inner = build_engine(llama(), runner=RunnerThatFails, max_running=2)

    async def main():
        async with running(inner) as engine:
            inner.runner.failing = range(failing, failing + 3)  # both requests together, and each alone
            async with held(engine):
                tasks = []
                for index in range(4):
                    tasks.append(
                        asyncio.create_task(read(engine, ask(0, question=(index,)), replace(GREEDY, max_tokens=6)))
                    )
                    await asyncio.sleep(0)
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert engine.is_alive and engine.failure is None
            again = await read(engine, ask(0, 1))
            return ends, again

    ends, again = asyncio.run(main())
    for error in ends[:num_ended]:
        assert type(error) is EngineError and "device" not in str(error), ends
        assert isinstance(error.__cause__, RuntimeError)
    expected = [alone(ask(0, question=(index,)), replace(GREEDY, max_tokens=6)) for index in range(num_ended, 4)]
    assert ends[num_ended:] == expected
    assert again == alone(ask(0, 1))


def test_an_engine_that_fails_again_and_again_refuses_work_until_it_is_well():
    inner = build_engine(llama(), runner=RunnerThatFails, max_running=1)
    inner.runner.failing = range(1, 1_000_000)

    async def main():
        async with running(inner) as engine:
            tasks = [asyncio.create_task(read(engine, ask(0))) for _ in range(MAX_FAILURES + 3)]
            warm = asyncio.create_task(anext(engine.warm([ask(1)])))
            *ends, (_, warm_up) = await asyncio.wait_for(asyncio.gather(*tasks, warm, return_exceptions=True), 120)
            assert all(isinstance(end, EngineError) for end in ends) and isinstance(warm_up.error, EngineError)
            assert engine.is_alive and "in a row failed (RuntimeError)" in engine.failure
            assert engine.failing_seconds > 0
            with pytest.raises(EngineFailing, match="ask again"):
                await read(engine, ask(0))
            assert await engine.call(lambda inner: "still answered") == "still answered"
            num_runs, begin = inner.runner.num_runs, time.monotonic()
            await asyncio.sleep(1.2 * TRIAL_SECONDS)
            num_trials = inner.runner.num_runs - num_runs
            assert 0 < num_trials <= (time.monotonic() - begin) / TRIAL_SECONDS + 1, "one trial per second"
            inner.runner.failing = ()
            await until(lambda: engine.failure is None)
            assert engine.failing_seconds == 0
            assert await read(engine, ask(0)) == alone(ask(0))

    asyncio.run(main())


class RunnerWithPoison(RunnerThatFails):
    """A fake of a model that cannot bear one token: fails whenever it is among those of a step."""

    def run(self, spans):
        self.failing = {self.num_runs} if any(POISON in span.token_ids for span in spans) else ()
        return super().run(spans)


def test_a_request_that_always_fails_keeps_the_engine_from_others_for_no_longer_than_a_step(monkeypatch):
    monkeypatch.setattr("kvmosaic.engine.engine_thread.TRIAL_SECONDS", 3_600.0)
    inner = build_engine(llama(), runner=RunnerWithPoison)

    async def main():
        async with running(inner) as engine:
            for _ in range(4 * MAX_FAILURES):
                with pytest.raises(EngineError):
                    await read(engine, Prompt.plain([5, POISON, 5]))
                await until(lambda: engine.failure is None)  # not by the trials that are repeated
            assert await read(engine, ask(0)) == alone(ask(0))

    asyncio.run(main())


def test_a_step_that_fails_before_anyone_takes_part_is_not_repeated_for_ever(monkeypatch):
    inner = build_engine(llama(), runner=RunnerThatFails)

    async def main():
        async with running(inner) as engine:
            with monkeypatch.context() as broken:
                broken.setattr(inner.scheduler, "schedule", lambda: 1 / 0)
                with pytest.raises(EngineError, match="before any request took part"):
                    await asyncio.wait_for(read(engine, ask(0)), 120)
            assert await read(engine, ask(0)) == alone(ask(0))

    asyncio.run(main())


def test_stopping_ends_answers_with_abort_and_refuses_what_was_not_begun():
    inner = build_engine(llama(), blocks=ROOMY)

    async def main():
        engine = AsyncEngine(inner)
        engine.start()
        deltas = engine.generate(ask(0), LONG)
        seen = [await anext(deltas)]
        async with held(engine):
            late = asyncio.create_task(read(engine, ask(1)))
            call = asyncio.create_task(engine.call(lambda inner: "never"))
            closing = asyncio.create_task(engine.close())
            await until(lambda: engine._thread._is_stopping)
        seen += [delta async for delta in deltas]
        assert seen[-1].finished and seen[-1].answers[0].finish_reason == "abort"
        assert tokens(seen) == alone(ask(0), replace(GREEDY, max_tokens=len(tokens(seen))))
        results = await asyncio.gather(late, call, return_exceptions=True)
        assert [type(result) for result in results] == [EngineStopped, EngineStopped]
        await closing
        await engine.close()
        engine.stop()
        assert not engine.is_alive and engine.failure is None
        with pytest.raises(EngineStopped, match="make a new one"):
            engine.start()

    asyncio.run(main())
    assert_only_the_cache_holds_blocks(inner)
    assert token_ids(answer(inner, ask(0))[0]) == alone(ask(0)), "the engine itself is as good as before"


def test_what_waits_for_an_engine_that_never_starts_is_told():
    async def main():
        engine = AsyncEngine(build_engine(llama()))
        reader = asyncio.create_task(read(engine, ask(0)))
        await asyncio.sleep(0)
        assert not engine.is_alive and engine.num_waiting == 1
        engine.stop()
        with pytest.raises(EngineStopped):
            await asyncio.wait_for(reader, 120)

    asyncio.run(main())


def test_calls_run_in_order_between_steps_and_their_errors_are_raised():
    async def main():
        async with (
            running(build_engine(llama(), blocks=ROOMY)) as engine,
            aclosing(engine.generate(ask(0), LONG)) as deltas,
        ):
            await anext(deltas)
            order = []
            await asyncio.gather(*[engine.call(lambda inner, i=i: order.append(i)) for i in range(5)])
            assert order == [0, 1, 2, 3, 4]
            with pytest.raises(UnknownRequest, match="'nobody'"):
                await engine.call(lambda inner: inner.abort("nobody"))
            async with held(engine):
                cancelled = asyncio.create_task(engine.call(lambda inner: order.append("cancelled")))
                await asyncio.sleep(0)
                cancelled.cancel()
                await asyncio.wait([cancelled])  # before the engine's thread goes on
            assert await engine.call(lambda inner: list(order)) == [0, 1, 2, 3, 4]
            await engine.call(lambda inner: inner.abort_all(inner.unfinished_requests))
            rest = [delta async for delta in deltas]
            assert rest[-1].finished and rest[-1].answers[0].finish_reason == "abort"

    asyncio.run(main())


def test_a_long_list_is_warmed_a_few_at_a_time_while_others_are_answered():
    prompts = [Prompt.from_tokens(SYSTEM, [[index, 5, 6]], (0,)) for index in range(50)]
    prompts[20] = Prompt.from_tokens(SYSTEM, [list(range(100))], (0,))

    async def main():
        async with running(build_engine(llama(), blocks=(128, 16))) as engine:
            most, ended = 0, {}
            async for number, warm_up in engine.warm(prompts):
                most = max(most, await engine.call(lambda inner: len(inner.unfinished_requests)))
                ended[number] = warm_up
                if number == 30:
                    assert await read(engine, ask(0)) == alone(ask(0))
            assert sorted(ended) == list(range(50)) and most <= 16
            assert isinstance(ended.pop(20).error, ChunkCacheFull)
            assert all(request.error is None and request.prompt is prompts[n] for n, request in ended.items())

    asyncio.run(main())


def test_closing_a_warm_up_aborts_the_rest_of_it():
    prompts = [Prompt.from_tokens(SYSTEM, [[index, 5, 6]], (0,)) for index in range(50)]

    async def main():
        async with running(build_engine(llama(), max_batched_tokens=4)) as engine:
            async with aclosing(engine.warm(prompts)) as ended:
                await anext(ended)
            assert await engine.call(lambda inner: inner.unfinished_requests) == []
            with pytest.raises(InvalidPrompt, match="at least one document"):
                [end async for end in engine.warm([ask(0), Prompt.plain([1])])]
            assert [end async for end in engine.warm([])] == []

    asyncio.run(main())


FORGETFUL = """
import asyncio
from support.engines import GREEDY, build_engine
from support.loaded import loaded_family
from kvmosaic.engine import AsyncEngine
from kvmosaic.prompt import Prompt

async def main():
    engine = AsyncEngine(build_engine(loaded_family("llama")))
    engine.start()
    await engine.call(lambda inner: [inner.add_request(Prompt.plain([1]), GREEDY) for _ in range(500)])

asyncio.run(main())
"""


def test_a_process_that_forgets_to_stop_its_engine_ends_well():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", FORGETFUL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
