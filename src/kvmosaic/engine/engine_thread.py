"""Engine thread: runs an engine's steps, and queued commands between them."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvmosaic.engine.engine import Engine
from kvmosaic.engine.figures import EngineFigures, take_figures
from kvmosaic.engine.request import Request
from kvmosaic.engine.stream import Stream, wake_all
from kvmosaic.errors import EngineError, EngineFailing, EngineStopped
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import SamplingParams

logger = logging.getLogger("kvmosaic")

T = TypeVar("T")

MAX_FAILURES = 5
"""Consecutive failed steps after which new requests are refused until a trial succeeds."""
TRIAL_SECONDS = 1.0
"""Interval between trials."""
COMMAND_SECONDS = 0.02
"""Max time for commands between two steps; the rest runs after the next step."""

Run = Callable[[], None]
Refuse = Callable[[EngineStopped], None]


class EngineThread:
    """The only thread that touches an engine, and the queues that feed it.

        close ──▶ closed streams ──▶ abort ┐
        call ──┬▶ commands ──▶ some of them ┴▶ step ──▶ figures, then outputs ──▶ streams, one wake-up per loop
        add ───┘        ▲                        │
                        └─── wait, if idle ◀─────┘   (or if the engine sleeps)

    However it ends, every waiter gets a result or an error: each command is run or refused, each stream ends. Figures
    are published before the outputs that changed them.

    A failing step never ends it. After several in a row no request is accepted; as soon as the engine is idle, a trial
    request of one token runs. If that succeeds, the requests were at fault and normal operation resumes; if not, the
    device is, and the trial is repeated every second:

        healthy ── 5 steps in a row fail ──▶ failing ── a step succeeds, of a trial or not ──▶ healthy
    """

    def __init__(self, engine: Engine) -> None:
        """Takes exclusive ownership of the engine from `start` on."""
        self.engine = engine
        self.failure: str | None = None
        """Why requests are refused, now or permanently; None while healthy, and after `stop`."""
        self.failing_since: float | None = None
        """When `failure` was set, by `time.monotonic`."""
        self.figures: EngineFigures = take_figures(engine)
        """As of the last step, or the last command; replaced as a whole, so any thread may read it."""
        self._is_waiting = False
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        # appended by any thread that holds `_changed`
        self._commands: deque[tuple[Run, Refuse]] = deque()
        self._closed: deque[Stream[Any]] = deque()
        self._is_stopping = False
        self._has_ended = False
        # of this thread only
        self._streams: dict[Request, Stream[Any]] = {}
        self._has_called = False
        self._num_failures = 0
        self._next_trial = 0.0
        self._sleepers: list[Future[bool]] = []

    @property
    def num_commands(self) -> int:
        """Queued commands."""
        return len(self._commands)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs steps."""
        return self._thread is not None and self._thread.is_alive() and not self._has_ended

    @property
    def figures_age_seconds(self) -> float:
        """For how long the engine may have changed without new figures; 0 while it is idle."""
        return 0.0 if self._is_waiting else max(time.monotonic() - self.figures.time, 0.0)

    def start(self) -> None:
        """Starts the thread; does nothing while it runs.

        Raises:
            EngineStopped: after `stop`.
        """
        with self._changed:
            if self._is_stopping or self._has_ended:
                raise EngineStopped("the engine was stopped and cannot be started again; make a new one")
            if self._thread is None:
                self._publish()
                self._thread = threading.Thread(target=self._run, name="kvmosaic-engine", daemon=True)
                self._thread.start()
                atexit.register(self.stop)  # a process that exits in the middle of a forward would crash

    def stop(self) -> None:
        """Aborts all requests and waits for the thread to end; calling it again is safe."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
            thread = self._thread
        if thread is None:
            self._end()
        elif thread is not threading.current_thread():
            thread.join()
            atexit.unregister(self.stop)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Queues a function; cancelling the future while it is queued removes it.

        Raises:
            EngineStopped: the thread has ended, or is about to.
        """
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            self._has_called = True
            try:
                result = function(self.engine)
                self._publish()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        def refuse(error: EngineStopped) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._send(run, refuse)
        return future

    def sleep(self, level: int, *, refuse: bool) -> Future[bool]:
        """Queues a sleep command; its result is True once the engine sleeps, False if it was woken before it did.

        Cancelling the future while it is queued removes it; later, cancelling only stops the wait.

        Raises:
            EngineStopped: the thread has ended, or is about to.
        """
        future: Future[bool] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                self.engine.sleep(level, refuse=refuse)
            except BaseException as error:
                future.set_exception(error)
            else:
                self._sleepers.append(future)

        def refuse_it(error: EngineStopped) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._send(run, refuse_it)
        return future

    def add(self, stream: Stream[Any], add: Callable[[Engine], Request]) -> None:
        """Queues a request whose output goes to a stream, as does the error of `add`.

        Raises:
            EngineStopped: the thread has ended, or is about to.
            EngineFailing: too many consecutive steps have failed; see `failure`.
        """
        if self.failure is not None and not self._has_ended:
            raise EngineFailing("steps fail again and again, and nothing new is taken in; ask again in a second")

        def run() -> None:
            if stream.is_closed:
                return
            try:
                request = add(self.engine)
            except Exception as error:
                self._fail(stream, error)
            else:
                stream.requests.add(request)
                self._streams[request] = stream

        self._send(run, lambda stopped: self._fail(stream, stopped))

    def close(self, stream: Stream[Any]) -> None:
        """Marks a stream as no longer read; safe at any time, from any thread, and more than once."""
        with self._changed:
            stream.is_closed = True
            if not self._has_ended:
                self._closed.append(stream)
                self._changed.notify()

    def _send(self, run: Run, refuse: Refuse) -> None:
        with self._changed:
            if self._is_stopping or self._has_ended:
                raise EngineStopped(self.failure or "the engine has stopped")
            self._commands.append((run, refuse))
            self._changed.notify()

    def _run(self) -> None:
        try:
            device = str(self.engine.runner.model.device)
            if device.startswith("cuda"):  # the current device is per thread
                import torch

                torch.cuda.set_device(device)
            while self._wait():
                self._run_commands()
                if not self.engine.has_unfinished_requests and self._is_trial_due:
                    self._try()
                if self.engine.has_work and not self._is_stopping:
                    self._step()
                self._tell_sleepers()
        except BaseException as error:
            self.failure = f"the engine has stopped after an error ({type(error).__name__})"
            logger.exception("the engine's thread ends: %s", self.failure)
        finally:
            self._end()

    def _wait(self) -> bool:
        """Sleeps until there is work; returns False to stop."""
        with self._changed:
            while not (self._is_stopping or self._commands or self._closed or self.engine.has_work):
                if self._is_trial_due:
                    break
                self._is_waiting = True
                self._changed.wait(None if self.failure is None else TRIAL_SECONDS)
                self._is_waiting = False
            return not self._is_stopping

    @property
    def _is_trial_due(self) -> bool:
        """Whether to run a trial; never while the engine sleeps, or is about to, since none could run."""
        is_awake = not self.engine.sleep_level
        return self.failure is not None and is_awake and time.monotonic() >= self._next_trial

    def _try(self) -> None:
        """Queues a trial request of one token, whose output is discarded."""
        self._next_trial = time.monotonic() + TRIAL_SECONDS
        try:
            self.engine.add_request(Prompt.plain([0]), SamplingParams(max_tokens=1))
        except Exception as error:
            self._note_failure(error)

    def _abort_closed(self) -> None:
        while self._closed:
            stream = self._closed.popleft()
            for request in stream.requests:
                self._streams.pop(request, None)
            self.engine.abort_all(stream.requests)
            stream.requests.clear()

    def _run_commands(self) -> None:
        """Runs commands for a while; streams closed before a command was sent are aborted before it runs."""
        end = time.monotonic() + COMMAND_SECONDS
        has_news = bool(self._closed or self._commands)
        self._abort_closed()
        while self._commands and not self._is_stopping:
            run, _ = self._commands.popleft()
            self._abort_closed()
            run()
            if time.monotonic() >= end:
                break
        if self._has_called:
            self._has_called = False
            self._tell_ended()
        elif has_news:
            self._publish()

    def _step(self) -> None:
        under_way = self.engine.unfinished_requests
        try:
            news = self.engine.step()
        except Exception as error:
            if self._sleepers and not self.engine.sleep_level:  # it could not fall asleep, and no request is at fault
                logger.exception("the engine could not fall asleep")
                self._tell_sleepers(EngineError("the engine could not fall asleep, and goes on"))
                self._tell_ended()
                return
            self._note_failure(error)
            if len(self.engine.unfinished_requests) == len(under_way):  # no request in the step: it would fail for ever
                self._abort_unfinished(EngineError("a step failed before any request took part in it"))
            self._tell_ended()
        else:
            self._num_failures, self._next_trial = 0, 0.0
            self.failure = self.failing_since = None
            self._tell(news)

    def _publish(self) -> None:
        self.figures = take_figures(self.engine)

    def _note_failure(self, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures <= MAX_FAILURES:
            logger.exception("a step failed, and with it the requests that took part in it")
        else:
            logger.error("%d steps in a row have failed: %s", self._num_failures, type(error).__name__)
        if self._num_failures >= MAX_FAILURES:
            self.failure = f"{self._num_failures} steps in a row failed ({type(error).__name__})"
            self.failing_since = self.failing_since or time.monotonic()

    def _tell_sleepers(self, error: EngineError | None = None) -> None:
        """Resolves the futures of `sleep` as soon as the outcome is certain."""
        if self._sleepers and (error or self.engine.is_asleep or not self.engine.sleep_level):
            sleepers, self._sleepers = self._sleepers, []
            for sleeper in sleepers:
                if error is None:
                    sleeper.set_result(self.engine.is_asleep)
                else:
                    sleeper.set_exception(error)

    def _tell_ended(self) -> None:
        """Publishes requests that ended outside a step's result: in a failed step, or in a call."""
        self._tell([request for request in self._streams if request.is_finished])

    def _tell(self, news: list[Request]) -> None:
        """Publishes the figures, puts new output into the streams, and wakes each event loop once."""
        self._publish()
        now = self.engine.clock()
        told = []
        for request in news:
            stream = self._streams.get(request)
            if stream is None:
                continue
            if stream.loop.is_closed():
                self.close(stream)
                continue
            error = None if request.is_warm_up else request.error
            if stream.put(request, now) if error is None else stream.fail(error):
                told.append(stream)
            if request.is_finished:
                del self._streams[request]
                stream.requests.discard(request)
        self._wake(told)

    def _fail(self, stream: Stream[Any], error: Exception) -> None:
        if stream.fail(error):
            self._wake([stream])

    def _wake(self, streams: list[Stream[Any]]) -> None:
        for loop in {stream.loop for stream in streams}:
            of_loop = [stream for stream in streams if stream.loop is loop]
            try:
                loop.call_soon_threadsafe(wake_all, of_loop)
            except RuntimeError:  # the loop is closed, and its tasks are gone
                for stream in of_loop:
                    self.close(stream)

    def _end(self) -> None:
        """Shuts down, whatever the cause: aborts all requests and resolves every waiter."""
        with self._changed:
            if self._has_ended:
                return
            self._has_ended = True
            commands, self._commands = self._commands, deque()
        try:
            self._abort_unfinished(None if self.failure is None else EngineError(self.failure))
            if self.failure is not None:
                self.engine.close()
        except BaseException:
            logger.exception("the engine could not be put in order")
        text = self.failure or "the engine has stopped"
        for stream in self._streams.values():
            self._fail(stream, EngineStopped(text))
        self._tell_sleepers(EngineStopped(text))
        for _, refuse in commands:
            refuse(EngineStopped(text))

    def _abort_unfinished(self, error: EngineError | None) -> None:
        unfinished = self.engine.unfinished_requests
        for request in unfinished:
            request.error = error
        self.engine.abort_all(unfinished)
        self._tell_ended()
