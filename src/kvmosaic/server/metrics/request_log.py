"""Request log: records of the last few hundred requests, for the metrics and the dashboard."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Literal

from kvmosaic.engine.priorities import PriorityClass
from kvmosaic.sampling import RequestMetrics, ReuseReport

MAX_RECORDS = 500
MAX_UNREAD = 256
MAX_INTER_TOKEN_SECONDS = 512
LEAST_TOKENS = 64
"""Minimum number of computed tokens: the time of fewer tells more about steps than about tokens."""
REMEMBERED_TOKENS = 2**15
"""Window of the mean, in computed tokens of the latest requests."""

RequestStatus = Literal["complete", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """Record of one ended request."""

    request_id: str
    route: str
    tenant: str
    time: float
    """Unix seconds at its end."""
    num_prompt_tokens: int
    num_answer_tokens: int
    finish_reasons: tuple[str, ...]
    status: RequestStatus
    reuse: ReuseReport | None
    metrics: RequestMetrics | None
    inter_token_seconds: tuple[float, ...]
    """Seconds between consecutive tokens; the first 512."""
    estimated_uncached_ttft: float | None
    """Estimated TTFT without any reuse, from the time that computed tokens took."""
    priority: PriorityClass = "normal"
    error: str | None = None
    """Class of the error, if it failed."""


class RequestLog:
    """The last records, newest last, and their subscribers. Used on the event loop only."""

    def __init__(self, size: int = MAX_RECORDS) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=size)
        self._queues: list[asyncio.Queue[RequestRecord | None]] = []
        self._listeners: list[Callable[[RequestRecord], None]] = []
        self._is_closed = False
        self._learned_tokens = 0.0
        self._learned_seconds = 0.0

    def add(self, record: RequestRecord) -> None:
        """Appends a record and notifies subscribers. A slow reader loses its oldest unread ones."""
        self._records.append(record)
        for listener in self._listeners:
            listener(record)
        for queue in self._queues:
            _put(queue, record)

    def listen(self, listener: Callable[[RequestRecord], None]) -> None:
        """Calls `listener` with every new record, synchronously on the event loop; it must be fast."""
        self._listeners.append(listener)

    def recent(self, n: int = MAX_RECORDS, tenant: str | None = None) -> list[RequestRecord]:
        """Returns the last `n` records, oldest first; of one tenant, or of all."""
        found = [record for record in self._records if tenant is None or record.tenant == tenant]
        return found[-n:] if n > 0 else []

    async def subscribe(self, tenant: str | None = None) -> AsyncIterator[RequestRecord]:
        """Yields every new record until the server closes; of one tenant, or of all."""
        queue: asyncio.Queue[RequestRecord | None] = asyncio.Queue(MAX_UNREAD)
        if self._is_closed:
            return
        self._queues.append(queue)
        try:
            while (record := await queue.get()) is not None:
                if tenant is None or record.tenant == tenant:
                    yield record
        finally:
            self._queues.remove(queue)

    def close(self) -> None:
        """Ends every subscription."""
        self._is_closed = True
        for queue in self._queues:
            _put(queue, None)

    def learn(self, reuse: ReuseReport) -> None:
        """Updates the running mean with the computed tokens of one request, weighted per token.

        Questions do not count: they are short, and their steps would have been needed anyway.
        """
        computed = [segment for segment in reuse.segments if segment.kind != "question" and segment.computed_tokens > 0]
        num_tokens = sum(segment.computed_tokens for segment in computed)
        if num_tokens < LEAST_TOKENS:
            return
        kept = min(1.0, REMEMBERED_TOKENS / (self._learned_tokens + num_tokens))
        seconds = sum(segment.milliseconds for segment in computed) / 1e3
        self._learned_tokens = (self._learned_tokens + num_tokens) * kept
        self._learned_seconds = (self._learned_seconds + seconds) * kept

    @property
    def seconds_per_computed_token(self) -> float | None:
        """Recent seconds per computed token of a system text, a document or a plain prompt; None while unknown."""
        return self._learned_seconds / self._learned_tokens if self._learned_tokens else None

    def uncached_ttft(self, reuse: ReuseReport | None) -> float | None:
        """Returns the estimated TTFT without any reuse; None while unknown."""
        if reuse is None or reuse.time_to_first_token is None:
            return None
        if not reuse.reused_tokens:
            return reuse.time_to_first_token
        if (seconds := self.seconds_per_computed_token) is None:
            return None
        return reuse.time_to_first_token + reuse.reused_tokens * seconds


def _put(queue: asyncio.Queue[RequestRecord | None], record: RequestRecord | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(record)
