"""AsyncEngine: asyncio interface to an engine that runs on its own thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from kvmosaic.engine.engine import Engine
from kvmosaic.engine.engine_thread import EngineThread
from kvmosaic.engine.figures import EngineFigures
from kvmosaic.engine.priorities import WARM_PRIORITY
from kvmosaic.engine.request import Request
from kvmosaic.engine.stream import EndedWarmUps, RequestDelta, Stream, Unread
from kvmosaic.errors import EngineAsleep, KVMosaicError
from kvmosaic.layout import ChunkContext
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

T = TypeVar("T")

WARM_WINDOW = 16
"""Max concurrent warm-ups per call, so that a long list does not delay other requests."""


class AsyncEngine:
    """An engine on its own thread; asyncio tasks of any number of event loops talk to it through queues.

        engine = AsyncEngine(llm.engine)
        engine.start()
        async for delta in engine.generate(prompt, params):
            print(delta.answers[0].text, end="")
        await engine.close()

    From `start` on, only this thread may use the engine; `call` runs a function on it. However the thread ends, every
    waiting task gets a result or an error.
    """

    def __init__(self, engine: Engine) -> None:
        """Takes exclusive ownership of the engine from `start` on."""
        self._engine = engine
        self._thread = EngineThread(engine)

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no memory yet, and queued commands."""
        return self._engine.scheduler.num_waiting + self._thread.num_commands

    @property
    def num_running(self) -> int:
        """Sequences that are being computed."""
        return len(self._engine.scheduler.running)

    @property
    def figures(self) -> EngineFigures:
        """Engine figures as of the last step, or the last add, abort or call; never waits for a step."""
        return self._thread.figures

    @property
    def figures_age_seconds(self) -> float:
        """Max staleness of the figures: seconds since they were taken, 0 while the engine is idle."""
        return self._thread.figures_age_seconds

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; see also `failure`."""
        return self._thread.is_alive

    @property
    def is_healthy(self) -> bool:
        """Whether the thread runs and its steps do not fail repeatedly."""
        return self.is_alive and self.failure is None

    @property
    def failure(self) -> str | None:
        """Why requests are refused, now or permanently; None while healthy, and after `stop`.

        It is set after several consecutive failed steps, and reset by the first successful step: the engine retries
        with a trial request every second.
        """
        return self._thread.failure

    @property
    def failing_seconds(self) -> float:
        """How long `failure` has been set by failing steps; 0 if it is not."""
        since = self._thread.failing_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def is_asleep(self) -> bool:
        """Whether the caches hold no device memory; see `sleep`."""
        return self._engine.is_asleep

    @property
    def refuses(self) -> bool:
        """Whether the engine sleeps, or is about to, and refuses requests meanwhile."""
        return bool(self._engine.sleep_level) and self._engine.refuses

    def start(self) -> None:
        """Starts the thread; does nothing while it runs.

        Raises:
            EngineStopped: after `stop`.
        """
        self._thread.start()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs a function on the engine's thread, between two steps, and returns its result.

        If cancelled while queued, it is not run. It must be quick: every answer waits for it.

        Raises:
            EngineStopped: the engine has stopped.
            BaseException: whatever the function raises.
        """
        return await asyncio.wrap_future(self._thread.call(function))

    async def sleep(self, level: int = 1, *, refuse: bool = False) -> bool:
        """Releases the caches' device memory once the running requests have finished; see `Engine.sleep`.

        Cancelling only stops the wait: the engine still falls asleep, unless the command had not been sent yet.

        Args:
            level: 1 offloads the caches to host memory, 2 drops them.
            refuse: whether requests that arrive meanwhile are refused; otherwise they wait for `wake`.

        Returns:
            True once it sleeps, False if it was woken before it did.

        Raises:
            InvalidConfig: another level.
            EngineError: it could not fall asleep and continues to run.
            EngineStopped: the engine has stopped.
        """
        return await asyncio.wrap_future(self._thread.sleep(level, refuse=refuse))

    async def wake(self) -> None:
        """Reallocates the memory and resumes all waiting requests; does nothing while awake.

        Raises:
            EngineAsleep: not enough memory; the engine stays asleep.
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
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
        continuation: Sequence[int] | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Streams the answers to a prompt as deltas; the last one is `finished`.

        Closing this generator, or cancelling the task that reads it, aborts the request: its blocks are freed before
        the next step. A slow reader gets fewer, larger deltas. For the arguments see `Engine.add_request`. With a
        `continuation` nothing is generated: the only delta has its tokens, `scored`, and `params.logprobs` likely ones.

        Raises:
            EngineStopped: the engine has stopped.
            EngineFailing: too many consecutive steps have failed; see `failure`.
            EngineError: a step failed with this request in it.
            KVMosaicError: before the first delta, whatever `Engine.add_request` raises, and errors found when the
                request is scheduled, such as ChunkCacheFull.
        """
        stream: Stream[RequestDelta] = Stream(Unread())
        arrival_time = self._engine.clock()

        def add(engine: Engine) -> Request:
            if continuation is not None:
                return engine.add_score(
                    prompt,
                    continuation,
                    position_strategy=position_strategy,
                    chunk_context=chunk_context,
                    num_likely=params.logprobs,
                    priority=priority,
                )
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
        position_strategy: str | None = None,
        chunk_context: ChunkContext | None = None,
        priority: int = WARM_PRIORITY,
    ) -> AsyncGenerator[tuple[int, Request], None]:
        """Computes the chunks of prompts (or finds them cached); yields (prompt number, warm-up) as they finish.

        A failed warm-up has an `error`. Few run concurrently. Closing this generator aborts the rest.

        Raises:
            EngineStopped: the engine has stopped.
            EngineFailing: too many consecutive steps have failed; the rest is aborted.
            KVMosaicError: whatever `Engine.add_warm_up` raises; the rest is aborted.
        """
        stream: Stream[Request] = Stream(EndedWarmUps())
        numbers: dict[Request, int] = {}

        def add(number: int) -> None:
            def add_warm_up(engine: Engine) -> Request:
                request = engine.add_warm_up(
                    prompts[number],
                    position_strategy=position_strategy,
                    chunk_context=chunk_context,
                    priority=priority,
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

    async def close(self) -> None:
        """Does what `stop` does, without blocking the event loop."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Aborts all requests and waits for the thread to end; calling it again is safe.

        Readers get the tokens generated so far, finished with "abort"; requests that had not begun raise EngineStopped.
        """
        self._thread.stop()
