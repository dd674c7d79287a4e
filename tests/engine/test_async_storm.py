"""Storms: many tasks that ask, cancel, warm and look, in any order; afterwards everything is in its place."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from support.async_engines import RunnerThatFails, held, running, tokens
from support.engines import GREEDY, answer, build_engine, token_ids
from support.examples import examples
from support.loaded import loaded_family

from kvmosaic.errors import EngineError, EngineStopped
from kvmosaic.prompt import Prompt

SYSTEM = [1, 2, 3, 4, 5, 6]
DOCUMENTS = [[(7 * index + place) % 128 for place in range(9 + index)] for index in range(4)]
PROMPTS = [
    Prompt.from_tokens(SYSTEM, [DOCUMENTS[0], DOCUMENTS[1]], (7,)),
    Prompt.from_tokens(SYSTEM, [DOCUMENTS[2], DOCUMENTS[0]], (8, 9)),
    Prompt.from_tokens(SYSTEM, [DOCUMENTS[3]], (7,)),
    Prompt.plain([*SYSTEM, 3, 1, 4]),
]


@cache
def expected(number):
    return token_ids(answer(build_engine(loaded_family("llama")), PROMPTS[number])[0])


async def ask(engine, number, num_deltas):
    """Reads an answer to its end, or closes it after some deltas."""
    deltas = []
    async with aclosing(engine.generate(PROMPTS[number], GREEDY)) as coming:
        async for delta in coming:
            deltas.append(delta)
            if len(deltas) == num_deltas:
                break
    reasons = [answer.finish_reason for answer in deltas[-1].answers]
    if deltas[-1].finished and "abort" not in reasons:
        assert tokens(deltas) == expected(number)
    else:
        assert tokens(deltas) == expected(number)[: len(tokens(deltas))]


async def ask_and_cancel(engine, number, patience):
    task = asyncio.create_task(ask(engine, number, 0))
    await asyncio.sleep(patience * 1e-3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def warm(engine, number, num_ended):
    async with aclosing(engine.warm(PROMPTS[:3] * 7)) as ended:
        count = 0
        async for index, request in ended:
            assert request.error is None and request.prompt is PROMPTS[index % 3]
            count += 1
            if count == num_ended:
                return


async def look(engine, number, patience):
    await asyncio.sleep(patience * 1e-3)
    await engine.call(lambda inner: inner.check_invariants())


ACTIONS = st.tuples(st.sampled_from([ask, ask, ask_and_cancel, warm, look]), st.integers(0, 3), st.integers(0, 6))


@settings(max_examples=examples(25))
@given(
    st.lists(ACTIONS, min_size=1, max_size=16),
    st.sampled_from([(24, 12), (24, 24), (128, 128)]),
    st.integers(5, 60),
    st.booleans(),
)
def test_a_storm_leaves_nothing_behind_and_every_answer_is_right(actions, blocks, budget, at_once):
    inner = build_engine(loaded_family("llama"), blocks=blocks, max_batched_tokens=budget, max_running=5)

    async def main():
        async with running(inner) as engine:
            tasks = []
            if at_once:
                async with held(engine):
                    tasks += [asyncio.create_task(action(engine, *rest)) for action, *rest in actions]
                    await asyncio.sleep(0.002)
            else:
                tasks += [asyncio.create_task(action(engine, *rest)) for action, *rest in actions]
            await asyncio.wait_for(asyncio.gather(*tasks), 120)

    asyncio.run(main())


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), min_size=1, max_size=10),
    st.sets(st.integers(0, 12), max_size=4),
    st.sampled_from([(24, 12), (128, 128)]),
)
def test_whichever_steps_fail_all_answers_are_right_or_end_with_an_error(asked, failing, blocks):
    inner = build_engine(loaded_family("llama"), blocks=blocks, max_running=3, runner=RunnerThatFails)
    inner.runner.failing = failing

    async def main():
        async with running(inner) as engine:
            tasks = [asyncio.create_task(ask(engine, *rest)) for rest in asked]
            ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)
            inner.runner.failing = ()
            for number in range(len(PROMPTS)):
                await ask(engine, number, 0)
        return ends

    ends = asyncio.run(main())
    assert all(end is None or type(end) is EngineError for end in ends), ends


@settings(max_examples=15)
@given(st.lists(ACTIONS, min_size=1, max_size=10), st.integers(0, 10))
def test_a_stop_in_the_middle_of_a_storm_ends_every_task(actions, patience):
    inner = build_engine(loaded_family("llama"), max_running=3)

    async def main():
        async with running(inner) as engine:
            tasks = [asyncio.create_task(action(engine, *rest)) for action, *rest in actions]
            await asyncio.sleep(patience * 1e-3)
            await engine.close()
            ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 120)
            assert not engine.is_alive
        return ends

    ends = asyncio.run(main())
    assert all(end is None or type(end) is EngineStopped for end in ends), ends
