"""Request log: records of ended requests, for the metrics and the dashboard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvmosaic.engine.priorities import PriorityClass
from kvmosaic.sampling import RequestMetrics, ReuseReport

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
    """Passes records on to its listeners, and learns what computed tokens take. Used on the event loop only."""

    def __init__(self) -> None:
        self._listeners: list[Callable[[RequestRecord], None]] = []
        self._learned_tokens = 0.0
        self._learned_seconds = 0.0

    def add(self, record: RequestRecord) -> None:
        """Passes a record on."""
        for listener in self._listeners:
            listener(record)

    def listen(self, listener: Callable[[RequestRecord], None]) -> None:
        """Calls `listener` with every new record, synchronously on the event loop; it must be fast."""
        self._listeners.append(listener)

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
