"""AsyncEngine: an engine on a thread of its own, for asyncio tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from kvmosaic.engine.delta import RequestDelta, Unread
from kvmosaic.engine.engine import Engine
from kvmosaic.engine.engine_thread import EngineThread
from kvmosaic.engine.figures import EngineFigures
from kvmosaic.engine.request import Request
from kvmosaic.engine.stream import EndedWarmUps, Stream
from kvmosaic.errors import EngineAsleep, KVMosaicError
from kvmosaic.layout import ChunkContext, PositionStrategy
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

T = TypeVar("T")

WARM_WINDOW = 16
"""Warm-ups of one call that are under way at once, so that a long list does not keep requests waiting."""
DRAIN_SECONDS = 0.01
"""How often `drain` looks."""


class AsyncEngine:
    """An engine on a thread of its own; asyncio tasks, of any number of loops, talk to it through queues.

        engine = AsyncEngine(llm.engine)
        engine.start()
        async for delta in engine.generate(prompt, params):
            print(delta.answers[0].text, end="")
        await engine.close()

    From `start` on, nobody else may use the engine; `call` runs a function where that is safe. However the thread ends,
    everyone who waits is told.
    """

    def __init__(self, engine: Engine) -> None:
        """Takes an engine that nobody else uses from `start` on."""
        self._engine = engine
        self._thread = EngineThread(engine)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no memory yet, and commands that have not had their turn."""
        return self._engine.scheduler.num_waiting + self._thread.num_commands

    @property
    def num_running(self) -> int:
        """Sequences that are being computed."""
        return len(self._engine.scheduler.running)

    @property
    def figures(self) -> EngineFigures:
        """The numbers as of the last step, and of what was added, aborted or called since; never waits for a step."""
        return self._thread.figures

    @property
    def figures_age_seconds(self) -> float:
        """How old they may be: seconds since they were taken, 0 while the engine has nothing to do."""
        return self._thread.figures_age_seconds

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; see also `failure`."""
        return self._thread.is_alive

    @property
    def is_healthy(self) -> bool:
        """Whether the thread runs and its steps do not fail again and again."""
        return self.is_alive and self.failure is None

    @property
    def failure(self) -> str | None:
        """Why no request is taken, now or ever again; None while all is well, and after `stop`.

        It is set when several steps in a row have failed, and None again once one goes well: the engine tries one by
        itself every second.
        """
        return self._thread.failure

    @property
    def failing_seconds(self) -> float:
        """How long `failure` has been set by failing steps; 0 if it is not."""
        since = self._thread.failing_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def is_asleep(self) -> bool:
        """Whether the caches have no memory on the device; see `sleep`."""
        return self._engine.is_asleep

    @property
    def refuses(self) -> bool:
        """Whether the engine sleeps, or is about to, and takes no requests meanwhile."""
        return bool(self._engine.sleep_level) and self._engine.refuses

    def start(self) -> None:
        """Starts the thread; does nothing while it runs.

        Raises:
            EngineStopped: after `stop`.
        """
        self._thread.start()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs a function on the engine's thread, between two steps, and returns its result.

        Cancelled before its turn, it is not run. It must be quick: every answer waits for it.

        Raises:
            EngineStopped: the engine has stopped.
            BaseException: whatever the function raises.
        """
        return await asyncio.wrap_future(self._thread.call(function))

    async def sleep(self, level: int = 1, *, refuse: bool = False) -> bool:
        """Gives the device memory of the caches back when the requests that run have ended; see `Engine.sleep`.

        Cancelled, it only stops waiting: the engine falls asleep all the same, unless it was not told yet.

        Args:
            level: 1 keeps the caches in the memory of the host, 2 drops them.
            refuse: whether requests that come meanwhile are refused; otherwise they wait for `wake`.

        Returns:
            True when it sleeps, False if it was told to wake before it did.

        Raises:
            InvalidConfig: another level.
            EngineError: it could not fall asleep, and goes on.
            EngineStopped: the engine has stopped.
        """
        return await asyncio.wrap_future(self._thread.sleep(level, refuse=refuse))

    async def wake(self) -> None:
        """Takes the memory again and goes on with everything that waits; does nothing while awake.

        Raises:
            EngineAsleep: there is no memory for it; it sleeps on.
            EngineStopped: the engine has stopped.
        """
        try:
            await self.call(Engine.wake)
        except KVMosaicError:
            raise
        except Exception as error:
            raise EngineAsleep(f"the engine could not wake ({type(error).__name__}) and sleeps on") from error

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        note: str = "",
        position_strategy: PositionStrategy | None = None,
        chunk_context: ChunkContext | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Answers a prompt, delta by delta; the last one is `finished`.

        Closing this generator, or cancelling the task that reads it, aborts the request: its blocks are back before the
        next step. A slow reader gets fewer, larger deltas. For the arguments see `Engine.add_request`.

        Raises:
            EngineStopped: the engine has stopped.
            EngineFailing: too many steps in a row have failed; see `failure`.
            EngineError: a step failed with this request in it.
            KVMosaicError: before the first delta, whatever `Engine.add_request` raises and what is found out when it is
                the request's turn, such as ChunkCacheFull.
        """
        stream: Stream[RequestDelta] = Stream(Unread())
        arrival_time = self._engine.clock()

        def add(engine: Engine) -> Request:
            return engine.add_request(
                prompt,
                params,
                request_id=request_id,
                priority=priority,
                note=note,
                position_strategy=position_strategy,
                chunk_context=chunk_context,
                arrival_time=arrival_time,
            )

        try:
            self._thread.add(stream, add)
            while True:
                delta = await stream.take()
                yield delta
                if delta.finished:
                    return
        finally:
            self._thread.close(stream)

    async def warm(
        self,
        prompts: Sequence[Prompt],
        *,
        position_strategy: PositionStrategy | None = None,
        chunk_context: ChunkContext | None = None,
    ) -> AsyncGenerator[tuple[int, Request], None]:
        """Computes the chunks of prompts (or finds them); gives (number of the prompt, warm-up) as they end.

        One that could not run has an `error`. Only a few are under way at once. Closing this generator aborts the rest.

        Raises:
            EngineStopped: the engine has stopped.
            EngineFailing: too many steps in a row have failed; the rest is then aborted.
            KVMosaicError: whatever `Engine.add_warm_up` raises; the rest is then aborted.
        """
        stream: Stream[Request] = Stream(EndedWarmUps())
        numbers: dict[Request, int] = {}

        def add(number: int) -> None:
            def add_warm_up(engine: Engine) -> Request:
                request = engine.add_warm_up(
                    prompts[number], position_strategy=position_strategy, chunk_context=chunk_context
                )
                numbers[request] = number
                return request

            self._thread.add(stream, add_warm_up)

        try:
            for number in range(min(WARM_WINDOW, len(prompts))):
                add(number)
            for following in range(WARM_WINDOW, WARM_WINDOW + len(prompts)):
                request = await stream.take()
                if following < len(prompts):
                    add(following)
                yield numbers.pop(request), request
        finally:
            self._thread.close(stream)

    async def drain(self, seconds: float) -> bool:
        """Waits until nothing is under way, at most so long; returns whether that is so. It refuses no new requests."""
        end = time.monotonic() + seconds
        while self._thread.is_busy and time.monotonic() < end:
            await asyncio.sleep(DRAIN_SECONDS)
        return not self._thread.is_busy

    async def close(self) -> None:
        """Does what `stop` does, without holding up the loop."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Aborts everything under way and waits for the thread to end; calling it again is safe.

        Whoever reads an answer gets what there is of it, ended by "abort"; what was not begun raises EngineStopped.
        """
        self._thread.stop()
