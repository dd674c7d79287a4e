"""Request threads: slow work of requests beside the event loop, bounded in number and in CPU time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from kvmosaic.cpu_limit import cpu_limit
from kvmosaic.server.admission.fair_threads import FairThreads
from kvmosaic.server.admission.limits import Admission
from kvmosaic.server.errors import ApiError
from kvmosaic.server.tenants.access import Tenant

P = ParamSpec("P")
T = TypeVar("T")

NUM_THREADS = 2
"""Threads for tokenizing and compiling grammars; more would only take CPU time from the engine."""


class RequestThreads:
    """Threads that tokenize, compile grammars and read lists for requests, scheduled fairly among tenants.

    As many pieces of work may wait as answers may be queued. Used on the event loop only.
    """

    def __init__(self, admission: Admission, tenants: Iterable[Tenant], cpu_seconds: float) -> None:
        """Starts the threads.

        Args:
            admission: its limits on queued answers are those on waiting work.
            tenants: all tenants, with their weights.
            cpu_seconds: maximum CPU time of one piece of work.
        """
        self._pool = FairThreads(NUM_THREADS, {tenant.name: tenant.weight for tenant in tenants})
        self._admission = admission
        self._cpu_seconds = cpu_seconds
        self._work: set[Future[Any]] = set()
        """Queued or running work, including work whose caller was cancelled."""
        self._awaited: dict[asyncio.Future[Any], str] = {}
        """Awaited work, with its tenant."""
        self._is_closed = False

    @property
    def is_working(self) -> bool:
        """Whether a thread is busy; it cannot be stopped, and would keep the process from exiting."""
        return any(work.running() for work in list(self._work))

    @property
    def num_awaited(self) -> int:
        """Pieces of work whose callers wait."""
        return len(self._awaited)

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
        work = self._pool.submit(tenant, self._limited(function), *args, **kwargs)
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        awaited = asyncio.wrap_future(work)
        self._awaited[awaited] = tenant
        try:
            return await awaited
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and task is not None and not task.cancelling():
                raise self._closing() from None
            raise
        finally:
            self._awaited.pop(awaited, None)

    def cancel_all(self) -> None:
        """Refuses further work; callers that await a thread get an error at once."""
        self._is_closed = True
        for awaited in list(self._awaited):
            awaited.cancel()

    def shutdown(self) -> None:
        """Ends the threads as soon as they are idle."""
        self._pool.shutdown()

    def _check(self, tenant: str) -> None:
        admission = self._admission
        if len(self._awaited) >= admission.max_queue + NUM_THREADS:
            raise admission.full(f"{len(self._awaited)} requests wait to be read", "queue_full")
        num_of_tenant = list(self._awaited.values()).count(tenant)
        if num_of_tenant >= admission.max_queue_per_tenant + NUM_THREADS:
            raise admission.full(f"{num_of_tenant} requests of {tenant!r} wait to be read", "tenant_queue_full")

    def _limited(self, function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def limited(*args: P.args, **kwargs: P.kwargs) -> T:
            with cpu_limit(self._cpu_seconds):
                return function(*args, **kwargs)

        return limited

    def _closing(self) -> ApiError:
        return self._admission.unavailable("the server ended this request before it was read")
