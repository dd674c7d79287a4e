"""Admission control: limits on answers, and slow work beside the event loop, shared fairly among tenants."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from kvmosaic.container import limited_call
from kvmosaic.server.tenants.access import Tenant
from kvmosaic.web.errors import ApiError
from kvmosaic.web.request_body import counted

MAX_RETRY_SECONDS = 60
DRAIN_CHECK_SECONDS = 0.02
RATE_WINDOW = 64
"""Number of recent completions from which the throughput is estimated."""


class AdmissionControl:
    """Counts answers in progress; refuses requests that would exceed the queue limits.

        in progress = running (at most max_running) + queued (at most max_queue, and max_queue_per_tenant of one tenant)

    Used on the event loop only, so that a count is never read in the middle of an update.
    """

    def __init__(
        self,
        *,
        max_running: int,
        max_queue: int,
        max_queue_per_tenant: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.max_running = max_running
        self.max_queue = max_queue
        self.max_queue_per_tenant = max_queue_per_tenant
        self.is_draining = False
        self.num_refused = 0
        self._asking: dict[str, int] = {}
        """By tenant: requests for answers whose body is read, until their replies end."""
        self._clock = clock
        self._under_way: dict[str, int] = {}
        self._ends: deque[float] = deque(maxlen=RATE_WINDOW)

    @property
    def num_under_way(self) -> int:
        """Answers that were admitted and have not ended."""
        return sum(self._under_way.values())

    def num_under_way_of(self, tenant: Tenant) -> int:
        """Answers of one tenant that were admitted and have not ended."""
        return self._under_way.get(tenant.name, 0)

    @property
    def max_at_once(self) -> int:
        """Maximum number of answers admitted for one tenant when no other tenant has any."""
        return self.max_running + min(self.max_queue, self.max_queue_per_tenant)

    @property
    def num_waiting(self) -> int:
        """Admitted answers beyond `max_running`."""
        return max(0, self.num_under_way - self.max_running)

    @property
    def retry_seconds(self) -> int:
        """Estimated seconds until a slot is free, from the recent throughput: 1 to 60."""
        if len(self._ends) < 2:
            return 1
        seconds = max(self._clock() - self._ends[0], 1e-3)
        return min(max(math.ceil((self.num_waiting + 1) * seconds / len(self._ends)), 1), MAX_RETRY_SECONDS)

    def check(self, tenant: Tenant, num_answers: int = 1) -> None:
        """Raises what `enter` would raise; cheap enough to call before the prompt is tokenized.

        Raises:
            ApiError: 503 while the server drains, 429 when too many requests wait.
        """
        self._check(tenant, num_answers, self.num_under_way, self._under_way.get(tenant.name, 0))

    @contextmanager
    def asking(self, tenant: Tenant) -> Iterator[None]:
        """Counts a request for answers before its body is parsed.

        Sheds a burst before it costs anything: `check` alone would pass all of its requests until the first of them are
        tokenized.

        Raises:
            ApiError: see `check`.
        """
        self._check(tenant, 1, sum(self._asking.values()), self._asking.get(tenant.name, 0))
        with counted(self._asking, tenant.name):
            yield

    @contextmanager
    def enter(self, tenant: Tenant, num_answers: int = 1) -> Iterator[None]:
        """Holds slots for the answers to one prompt while they are in progress.

        Raises:
            ApiError: see `check`.
        """
        self.check(tenant, num_answers)
        try:
            with counted(self._under_way, tenant.name, num_answers):
                yield
        finally:
            self._ends.append(self._clock())

    def _check(self, tenant: Tenant, num_new: int, in_all: int, of_tenant: int) -> None:
        if self.is_draining:
            raise self.unavailable("the server is shutting down; ask another one, or this one later")
        if in_all + num_new > self.max_running + self.max_queue:
            raise self.full(f"too many requests wait already (--max-queue {self.max_queue})", "queue_full")
        if of_tenant + num_new > self.max_running + self.max_queue_per_tenant:
            limit = f"--max-queue-per-tenant {self.max_queue_per_tenant}"
            raise self.full(f"too many requests of {tenant.name!r} wait already ({limit})", "tenant_queue_full")

    async def drained(self, seconds: float) -> bool:
        """Waits until all answers have ended, at most `seconds`; returns whether they have."""
        end = self._clock() + seconds
        while self.num_under_way and self._clock() < end:
            await asyncio.sleep(DRAIN_CHECK_SECONDS)
        return not self.num_under_way

    def unavailable(self, message: str) -> ApiError:
        """The 503 reply of a server that accepts no requests now."""
        headers = {"Retry-After": str(self.retry_seconds)}
        return ApiError(503, message, type="service_unavailable", code="unavailable", headers=headers)

    def full(self, reason: str, code: str) -> ApiError:
        """The 429 reply of an overloaded server; counts a refusal."""
        self.num_refused += 1
        seconds = self.retry_seconds
        message = f"{reason}; try again in {seconds} s"
        return ApiError(429, message, type="rate_limit_error", code=code, headers={"Retry-After": str(seconds)})


P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 2
"""Threads for tokenizing and compiling grammars; more would only take CPU time from the engine."""
LEAST_SECONDS = 1e-3
"""Minimum charge for a piece of work, so that a thousand tiny ones are not free."""


@dataclass(slots=True)
class _Line:
    """Queue of one tenant."""

    spent: float
    """CPU seconds of its work / its weight; a returning tenant starts at the current virtual time."""
    work: deque[tuple[Future[Any], Callable[[], Any]]] = field(default_factory=deque)
    num_running: int = 0


class FairThreads:
    """Thread pool that schedules the work of several tenants fairly.

    Next is the oldest work of the tenant with the least CPU time so far, relative to its weight (start-time fair
    queueing). A new or returning tenant starts at the current virtual time: idle time earns no credit, and time that no
    other tenant wanted costs nothing. One thread always stays free for other tenants: a single tenant uses all but one.
    """

    def __init__(
        self,
        num_threads: int,
        weights: Mapping[str, float] | None = None,
        *,
        name: str = "kvmosaic-request",
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Starts the threads, as daemons.

        Args:
            num_threads: number of threads.
            weights: weights of tenants; the default is 1.
            name: prefix of the thread names.
            clock: of the time that work is charged with; `time.monotonic` for work of other processes.
        """
        self.weights = weights or {}
        """Replaced, never changed."""
        self.max_of_one = max(num_threads - 1, 1)
        self._lines: dict[str, _Line] = {}
        """Queues of tenants with queued or running work."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._clock = clock
        self._now = 0.0
        """Virtual time: what the tenant had spent whose work started last. New tenants start here."""
        for number in range(num_threads):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def submit(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queues work of a tenant.

        Raises:
            RuntimeError: the threads were shut down.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("these threads take no more work")
            line = self._lines.setdefault(tenant, _Line(self._now))
            line.work.append((future, lambda: function(*args, **kwargs)))
            self._changed.notify()
        return future

    def shutdown(self) -> None:
        """Cancels queued work; does not wait for running work."""
        with self._changed:
            self._is_closed = True
            waiting = [future for line in self._lines.values() for future, _ in line.work]
            for line in self._lines.values():
                line.work.clear()
            self._changed.notify_all()
        for future in waiting:
            if future.cancel():
                future.set_running_or_notify_cancel()  # wakes who waits for several

    def _run(self) -> None:
        while True:
            with self._changed:
                while (tenant := self._next()) is None:
                    if self._is_closed:
                        return
                    self._changed.wait()
                line = self._lines[tenant]
                future, work = line.work.popleft()
                line.num_running += 1
                self._now = max(self._now, line.spent)
            begin = self._clock()
            tell: Callable[[], None] | None = None
            if future.set_running_or_notify_cancel():
                try:
                    tell = partial(future.set_result, work())
                except BaseException as error:
                    tell = partial(future.set_exception, error)
            spent = self._clock() - begin
            with self._changed:
                line.spent += max(spent, LEAST_SECONDS) / self.weights.get(tenant, 1.0)
                line.num_running -= 1
                if not line.work and not line.num_running:
                    del self._lines[tenant]
                self._changed.notify_all()
            if tell is not None:
                tell()  # once the work is paid for
            del future, work, tell  # frees the work and its result while the thread waits

    def _next(self) -> str | None:
        """Returns the next tenant in fair order that has work and may use another thread."""
        ready = [
            (line.spent, tenant)
            for tenant, line in self._lines.items()
            if line.work and line.num_running < self.max_of_one
        ]
        return min(ready)[1] if ready else None


class RequestThreads:
    """Threads that tokenize, compile grammars and read lists for requests, scheduled fairly among tenants.

    As many pieces of work may wait as answers may be queued. Used on the event loop only.
    """

    def __init__(self, admission: AdmissionControl, tenants: Iterable[Tenant], cpu_seconds: float) -> None:
        """Starts the threads.

        Args:
            admission: its limits on queued answers are those on waiting work.
            tenants: all tenants, with their weights.
            cpu_seconds: maximum CPU time of one piece of work.
        """
        self._pool = FairThreads(NUM_THREADS)
        self._admission = admission
        self.configure(tenants, cpu_seconds)
        self._work: set[Future[Any]] = set()
        """Queued or running work, including work whose caller was cancelled."""
        self.awaited: dict[asyncio.Future[Any], str] = {}
        """Awaited work, with its tenant."""
        self._is_closed = False

    @property
    def is_working(self) -> bool:
        """Whether a thread is busy; it cannot be stopped, and would keep the process from exiting."""
        return any(work.running() for work in list(self._work))

    def submit(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queues work without limits on its number or CPU time."""
        return self._pool.submit(tenant, function, *args, **kwargs)

    async def run(self, tenant: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs slow work of a tenant's request beside the event loop.

        Raises:
            ApiError: 429, too much of it is queued; 503, the server closes.
            Whatever `function` raises.
        """
        if self._is_closed:
            raise self._closing()
        self._check(tenant)
        limited = partial(limited_call, self._cpu_seconds, partial(function, *args, **kwargs))
        work = self._pool.submit(tenant, limited)
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        awaited = asyncio.wrap_future(work)
        self.awaited[awaited] = tenant
        try:
            return await awaited
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise self._closing() from None
            raise
        finally:
            self.awaited.pop(awaited, None)

    def cancel_all(self) -> None:
        """Refuses further work; callers that await a thread get an error at once."""
        self._is_closed = True
        for awaited in list(self.awaited):
            awaited.cancel()

    def shutdown(self) -> None:
        """Ends the threads as soon as they are idle."""
        self._pool.shutdown()

    def _check(self, tenant: str) -> None:
        admission = self._admission
        if len(self.awaited) >= admission.max_queue + NUM_THREADS:
            raise admission.full(f"{len(self.awaited)} requests wait to be read", "queue_full")
        num_of_tenant = list(self.awaited.values()).count(tenant)
        if num_of_tenant >= admission.max_queue_per_tenant + NUM_THREADS:
            raise admission.full(f"{num_of_tenant} requests of {tenant!r} wait to be read", "tenant_queue_full")

    def configure(self, tenants: Iterable[Tenant], cpu_seconds: float) -> None:
        """Changes weights and the limit, for work that comes from now on."""
        self._pool.weights = {tenant.name: tenant.weight for tenant in tenants}
        self._cpu_seconds = cpu_seconds

    def _closing(self) -> ApiError:
        return self._admission.unavailable("the server ended this request before it was read")
