"""Fair thread pool: slow work of requests beside the event loop, scheduled fairly among tenants."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

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
        self, num_threads: int, weights: Mapping[str, float] | None = None, *, name: str = "kvmosaic-request"
    ) -> None:
        """Starts the threads, as daemons.

        Args:
            num_threads: number of threads.
            weights: weights of tenants; the default is 1.
            name: prefix of the thread names.
        """
        self._weights = weights or {}
        self.max_of_one = max(num_threads - 1, 1)
        self._lines: dict[str, _Line] = {}
        """Queues of tenants with queued or running work."""
        self._changed = threading.Condition()
        self._is_closed = False
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
            future.cancel()

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
            begin = time.thread_time()
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            spent = time.thread_time() - begin
            del future, work  # frees the work and its result while the thread waits
            with self._changed:
                line.spent += max(spent, LEAST_SECONDS) / self._weights.get(tenant, 1.0)
                line.num_running -= 1
                if not line.work and not line.num_running:
                    del self._lines[tenant]
                self._changed.notify_all()

    def _next(self) -> str | None:
        """Returns the next tenant in fair order that has work and may use another thread."""
        ready = [
            (line.spent, tenant)
            for tenant, line in self._lines.items()
            if line.work and line.num_running < self.max_of_one
        ]
        return min(ready)[1] if ready else None
