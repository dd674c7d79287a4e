"""AsyncEngine: an engine on a thread of its own, for asyncio tasks."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from kvmosaic.engine.delta import RequestDelta, Unread
from kvmosaic.engine.engine import Engine
from kvmosaic.engine.request import Request
from kvmosaic.engine.stream import EndedWarmUps, Stream, wake_all
from kvmosaic.errors import EngineError, EngineStopped
from kvmosaic.layout import PositionStrategy
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

logger = logging.getLogger("kvmosaic")

T = TypeVar("T")

MAX_FAILURES = 5
"""So many steps in a row may fail before the engine is taken for broken."""
COMMAND_SECONDS = 0.02
"""Commands that wait may take this long between two steps; the rest of them comes after the next step."""
WARM_WINDOW = 16
"""Warm-ups of one call that are under way at once, so that a long list does not keep requests waiting."""
DRAIN_SECONDS = 0.01
"""How often `drain` looks."""

Command = Callable[[], None]


class AsyncEngine:
    """An engine on a thread of its own; asyncio tasks, of any number of loops, talk to it through queues.

        tasks           generate ─┐   warm ─┐   call ─┐                    ┌─▶ deltas
                                  ▼         ▼         ▼                    │
        engine's thread           [ commands ] ──▶ ended streams ──▶ step ─┘   and again

    Between two steps the thread aborts what nobody reads any more, runs commands, and sleeps if nothing is under way.
    Nobody else touches the engine as long as the thread lives. However it ends, everyone who waits is told.
    """

    def __init__(self, engine: Engine) -> None:
        """Takes an engine that nobody else uses from `start` on."""
        self._engine = engine
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._changed = threading.Condition()
        # guarded by `_changed`:
        self._commands: deque[tuple[Command, Callable[[BaseException], None]]] = deque()
        self._closed: deque[Stream[Any]] = deque()
        self._is_stopping = False
        self._has_ended = False
        # of the engine's thread:
        self._streams: dict[Request, Stream[Any]] = {}
        self._has_called = False
        self._num_failures = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no memory yet, and commands that have not had their turn."""
        return len(self._engine.scheduler.waiting) + len(self._commands)

    @property
    def num_running(self) -> int:
        """Sequences that are being computed."""
        return len(self._engine.scheduler.running)

    @property
    def is_alive(self) -> bool:
        """Whether requests are answered."""
        return self._thread is not None and self._thread.is_alive() and not self._has_ended

    @property
    def failure(self) -> str | None:
        """Why the engine no longer runs; None while it does, and after `stop`."""
        return self._failure

    def start(self) -> None:
        """Starts the thread; does nothing while it runs.

        Raises:
            EngineStopped: after `stop`.
        """
        with self._changed:
            if self._is_stopping or self._has_ended:
                raise EngineStopped("the engine was stopped and cannot be started again; make a new one")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvmosaic-engine", daemon=True)
                self._thread.start()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Runs a function on the engine's thread, between two steps, and returns its result.

        Cancelled before its turn, it is not run.

        Raises:
            EngineStopped: the engine has stopped.
            BaseException: whatever the function raises.
        """
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            self._has_called = True
            try:
                result = function(self._engine)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        def fail(error: BaseException) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._send(command, fail)
        return await asyncio.wrap_future(future)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        note: str = "",
        position_strategy: PositionStrategy | None = None,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Answers a prompt, delta by delta; the last one is `finished`.

        Closing this generator, or cancelling the task that reads it, aborts the request: its blocks are back before the
        next step. A slow reader gets fewer, larger deltas.

        Raises:
            EngineStopped: the engine has stopped.
            EngineError: a step failed with this request in it.
            KVMosaicError: before the first delta, whatever `Engine.add_request` raises, and what is found out later,
                such as ChunkCacheFull.
        """
        arrival_time = self._engine.clock()
        stream: Stream[RequestDelta] = Stream(Unread())

        def add(engine: Engine) -> Request:
            return engine.add_request(
                prompt,
                params,
                request_id=request_id,
                priority=priority,
                note=note,
                position_strategy=position_strategy,
                arrival_time=arrival_time,
            )

        try:
            self._add(stream, add)
            while True:
                delta = await stream.take()
                yield delta
                if delta.finished:
                    return
        finally:
            self._close(stream)

    async def warm(
        self, prompts: Sequence[Prompt], *, position_strategy: PositionStrategy | None = None
    ) -> AsyncGenerator[tuple[int, Request], None]:
        """Computes the chunks of prompts (or finds them); gives (number of the prompt, warm-up) as they end.

        One that could not run has an `error`. Only a few are under way at once. Closing this generator aborts the rest.

        Raises:
            EngineStopped: the engine has stopped.
            KVMosaicError: whatever `Engine.add_warm_up` raises; the rest is then aborted.
        """
        stream: Stream[Request] = Stream(EndedWarmUps())
        numbers: dict[Request, int] = {}

        def add(number: int) -> Callable[[Engine], Request]:
            def add_warm_up(engine: Engine) -> Request:
                request = engine.add_warm_up(prompts[number], position_strategy=position_strategy)
                numbers[request] = number
                return request

            return add_warm_up

        try:
            for number in range(min(WARM_WINDOW, len(prompts))):
                self._add(stream, add(number))
            for num_ended in range(len(prompts)):
                request = await stream.take()
                if num_ended + WARM_WINDOW < len(prompts):
                    self._add(stream, add(num_ended + WARM_WINDOW))
                yield numbers.pop(request), request
        finally:
            self._close(stream)

    async def drain(self, seconds: float) -> bool:
        """Waits until nothing is under way, at most so long; returns whether that is so. It refuses no new requests."""
        end = time.monotonic() + seconds
        while self._is_busy() and time.monotonic() < end:
            await asyncio.sleep(DRAIN_SECONDS)
        return not self._is_busy()

    async def close(self) -> None:
        """Like `stop`, without holding up the loop."""
        await asyncio.to_thread(self.stop)

    def stop(self) -> None:
        """Aborts everything under way and waits for the thread to end; calling it again is safe.

        Whoever reads an answer gets what there is of it, ended by "abort"; what was not begun raises EngineStopped.
        """
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
            thread = self._thread
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            thread.join()

    def _is_busy(self) -> bool:
        with self._changed:
            return not self._has_ended and bool(self._commands or self._engine.has_unfinished_requests)

    def _send(self, command: Command, fail: Callable[[BaseException], None]) -> None:
        """Queues a command; `fail` is called instead if the engine ends before its turn."""
        with self._changed:
            if self._is_stopping or self._has_ended:
                raise EngineStopped(self._failure or "the engine has stopped")
            self._commands.append((command, fail))
            self._changed.notify()

    def _add(self, stream: Stream[Any], add: Callable[[Engine], Request]) -> None:
        def command() -> None:
            if stream.is_closed:
                return
            try:
                request = add(self._engine)
            except Exception as error:
                self._wake([stream] if stream.fail(error) else [])
            else:
                stream.requests.add(request)
                self._streams[request] = stream

        def fail(error: BaseException) -> None:
            self._wake([stream] if stream.fail(error) else [])

        self._send(command, fail)

    def _close(self, stream: Stream[Any]) -> None:
        """Says that nobody reads a stream any more; safe at any time and on any thread."""
        with self._changed:
            stream.is_closed = True
            if not self._has_ended:
                self._closed.append(stream)
                self._changed.notify()

    def _run(self) -> None:
        """The engine's thread."""
        try:
            device = self._engine.runner.model.device
            if device.type == "cuda":
                torch.cuda.set_device(device)
            while self._wait():
                self._abort_closed()
                self._run_commands()
                if self._engine.has_unfinished_requests:
                    self._step()
        except BaseException as error:
            self._failure = self._failure or f"the engine has stopped after an error ({type(error).__name__})"
            logger.exception("the engine's thread ends")
        finally:
            self._end()

    def _wait(self) -> bool:
        """Sleeps until there is something to do; returns False when that is to stop."""
        with self._changed:
            while not (self._is_stopping or self._commands or self._closed or self._engine.has_unfinished_requests):
                self._changed.wait()
            return not self._is_stopping

    def _abort_closed(self) -> None:
        while self._closed:
            stream = self._closed.popleft()
            for request in stream.requests:
                self._streams.pop(request, None)
            self._engine.abort_all(stream.requests)
            stream.requests.clear()

    def _run_commands(self) -> None:
        end = time.monotonic() + COMMAND_SECONDS
        while self._commands:
            command, _ = self._commands.popleft()
            command()
            if time.monotonic() >= end:
                break
        if self._has_called:  # the function may have ended requests that others wait for
            self._has_called = False
            self._tell([request for request in self._streams if request.is_finished])

    def _step(self) -> None:
        try:
            news = self._engine.step()
        except Exception as error:
            self._num_failures += 1
            logger.exception("a step failed, and with it the requests that took part in it")
            self._tell([request for request in self._streams if request.is_finished])
            if self._num_failures >= MAX_FAILURES:
                self._failure = f"{MAX_FAILURES} steps in a row failed ({type(error).__name__})"
                raise
        else:
            self._num_failures = 0
            self._tell(news)

    def _tell(self, news: list[Request]) -> None:
        """Puts news into the streams of those who wait for them; every loop is woken once."""
        now = self._engine.clock()
        told = []
        for request in news:
            stream = self._streams.get(request)
            if stream is None:
                continue
            if stream.loop.is_closed():
                self._close(stream)
                continue
            failed = None if request.is_warm_up else request.error
            if stream.put(request, now) if failed is None else stream.fail(failed):
                told.append(stream)
            if request.is_finished:
                del self._streams[request]
                stream.requests.discard(request)
        self._wake(told)

    def _wake(self, streams: list[Stream[Any]]) -> None:
        for loop in {stream.loop for stream in streams}:
            try:
                loop.call_soon_threadsafe(wake_all, [stream for stream in streams if stream.loop is loop])
            except RuntimeError:  # the loop was closed, so its tasks are gone
                for stream in streams:
                    if stream.loop is loop:
                        self._close(stream)

    def _end(self) -> None:
        """The end, however it came: nothing is under way any more, and everyone who waits is told."""
        with self._changed:
            if self._has_ended:
                return
            self._has_ended = True
            commands, self._commands = self._commands, deque()
        text = self._failure or "the engine has stopped"
        try:
            unfinished = self._engine.unfinished_requests
            if self._failure is not None:
                for request in unfinished:
                    request.error = EngineError(self._failure)
            self._engine.abort_all(unfinished)
            self._tell(list(self._streams))
            if self._failure is not None:
                self._engine.close()
        except BaseException:
            logger.exception("the engine could not be put in order")
        for stream in self._streams.values():
            self._wake([stream] if stream.fail(EngineStopped(text)) else [])
        for _, fail in commands:
            fail(EngineStopped(text))
