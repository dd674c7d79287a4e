"""Admission control: limits on running and queued answers, in all and per tenant, and the replies beyond them."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvmosaic.server.tenants.access import Tenant
from kvmosaic.web.errors import ApiError

MAX_RETRY_SECONDS = 60
DRAIN_CHECK_SECONDS = 0.02
RATE_WINDOW = 64
"""Number of recent completions from which the throughput is estimated."""


class Admission:
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
        with _counted(self._asking, tenant.name, 1):
            yield

    @contextmanager
    def enter(self, tenant: Tenant, num_answers: int = 1) -> Iterator[None]:
        """Holds slots for the answers to one prompt while they are in progress.

        Raises:
            ApiError: see `check`.
        """
        self.check(tenant, num_answers)
        try:
            with _counted(self._under_way, tenant.name, num_answers):
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


@contextmanager
def _counted(counts: dict[str, int], name: str, number: int) -> Iterator[None]:
    counts[name] = counts.get(name, 0) + number
    try:
        yield
    finally:
        counts[name] -= number
        if not counts[name]:
            del counts[name]
