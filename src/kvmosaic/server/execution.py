"""Execution of a prompt for a route: admission, generation, record."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from kvmosaic.documents import shown_name
from kvmosaic.engine import AnswerDelta, RequestDelta
from kvmosaic.engine.priorities import class_of
from kvmosaic.errors import EngineAsleep, KVMosaicError
from kvmosaic.layout import ChunkContext
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import RequestMetrics, ReuseReport, SamplingParams
from kvmosaic.server.errors import ApiError
from kvmosaic.server.request_log import MAX_INTER_TOKEN_SECONDS, RequestRecord, RequestStatus
from kvmosaic.server.services import Services
from kvmosaic.server.tenants import Tenant


async def run(
    services: Services,
    tenant: Tenant,
    prompt: Prompt,
    params: SamplingParams,
    *,
    route: str,
    request_id: str,
    priority: int = 0,
    position_strategy: str | None = None,
    chunk_context: ChunkContext | None = None,
    note: str = "",
) -> AsyncGenerator[RequestDelta, None]:
    """Answers a tokenized prompt, delta by delta.

    Closing the iterator, or cancelling the task that reads it, aborts the request. However it ends, it adds one record.

    Args:
        services: services of the server.
        tenant: owner of the request; its name is part of all cache keys.
        prompt: from the encoder; `prompt.salt` is the request's `cache_salt`.
        params: how to sample.
        route: for the record, such as "/v1/chat/completions".
        request_id: of the HTTP request; prompts of one HTTP request share it, so the engine chooses its own names.
        priority: higher runs first, from -100 to 100.
        position_strategy: instead of the configured one.
        chunk_context: instead of the configured one.
        note: why the prompt was not composed, for the report.

    Raises:
        ApiError: 503 while the server drains, or the engine fails or has stopped, 429 when too many requests wait.
        EngineAsleep: the engine sleeps, and does not queue requests.
        KVMosaicError: the engine refuses the request or fails.
    """
    check_engine(services)
    _check_share(services, tenant, params, priority)
    seen = _Seen()
    with services.admission.enter(tenant, params.n):
        try:
            deltas = services.engine.generate(
                replace(prompt, tenant=tenant.name),
                params,
                priority=priority,
                note=note,
                position_strategy=position_strategy,
                chunk_context=chunk_context,
            )
            async with aclosing(deltas):
                async for delta in deltas:
                    if delta.reuse is not None:
                        delta = replace(delta, reuse=delta.reuse.renamed(shown_name))
                    seen.add(delta)
                    services.metrics.observe_delta(delta)
                    yield delta
        except KVMosaicError:
            seen.status = "failed"
            raise
        finally:
            record = seen.record(services, tenant, prompt, route, request_id)
            services.records.add(replace(record, priority=class_of(priority)))


def check_engine(services: Services) -> None:
    """Raises ApiError (503) if the engine has stopped or fails repeatedly; EngineAsleep if it sleeps."""
    if not services.engine.is_alive:
        raise services.admission.unavailable("the engine has stopped; the server must be started again")
    if services.engine.failure is not None:
        raise services.admission.unavailable("the engine fails now; it is tried again every second")
    if services.engine.refuses:
        raise EngineAsleep("the engine sleeps and takes no requests; ask again when it was woken")


def _check_share(services: Services, tenant: Tenant, params: SamplingParams, priority: int) -> None:
    """Refuses more answers than run at once, and a priority above 0 without an admin's key."""
    most = services.admission.max_running
    if params.n > most:
        raise ApiError(400, f"n is {params.n}; this server runs {most} answers at once (--max-num-seqs)", param="n")
    if priority > 0 and not tenant.is_admin:
        raise ApiError(403, f"priority is {priority}; only an admin's key may go before others", param="priority")


@dataclass(slots=True)
class _Seen:
    """State of a record while deltas stream."""

    status: RequestStatus = "cancelled"
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0
    finish_reasons: dict[int, str] = field(default_factory=dict)
    reuse: ReuseReport | None = None
    metrics: RequestMetrics | None = None
    gaps: list[float] = field(default_factory=list)
    _last_times: dict[int, float] = field(default_factory=dict)

    def add(self, delta: RequestDelta) -> None:
        self.num_prompt_tokens = delta.num_prompt_tokens
        self.reuse = delta.reuse or self.reuse
        self.metrics = delta.metrics or self.metrics
        for answer in delta.answers:
            self._add_answer(answer, delta.time)
        if delta.finished:
            aborted = "abort" in self.finish_reasons.values()
            self.status = "cancelled" if aborted else "complete"

    def _add_answer(self, answer: AnswerDelta, now: float) -> None:
        num_new = len(answer.token_ids)
        self.num_answer_tokens += num_new
        if answer.finish_reason is not None:
            self.finish_reasons[answer.index] = answer.finish_reason
        if not num_new:
            return
        last = self._last_times.get(answer.index)
        self._last_times[answer.index] = now
        if last is not None:  # several steps may have been merged: their tokens share the time
            room = MAX_INTER_TOKEN_SECONDS - len(self.gaps)
            self.gaps.extend([(now - last) / num_new] * min(num_new, room))

    def record(self, services: Services, tenant: Tenant, prompt: Prompt, route: str, request_id: str) -> RequestRecord:
        if self.reuse is not None:
            services.records.learn(self.reuse)
        return RequestRecord(
            request_id=request_id,
            route=route,
            tenant=tenant.name,
            time=services.clock(),
            num_prompt_tokens=self.num_prompt_tokens or prompt.num_tokens,
            num_answer_tokens=self.num_answer_tokens,
            finish_reasons=tuple(self.finish_reasons[index] for index in sorted(self.finish_reasons)),
            status=self.status,
            reuse=self.reuse,
            metrics=self.metrics,
            inter_token_seconds=tuple(self.gaps),
            estimated_uncached_ttft=services.records.uncached_ttft(self.reuse),
        )
