"""Route /metrics, and the counters of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmosaic.metrics import Meters, SampleCollector, catalogue, expose, own_names, vllm_names
from kvmosaic.server.tenants.access import current_admin

if TYPE_CHECKING:
    from kvmosaic.engine import RequestDelta
    from kvmosaic.sampling import RequestMetrics
    from kvmosaic.sampling.reuse import RepairUse
    from kvmosaic.server.metrics.gauges import ServerReadings
    from kvmosaic.server.metrics.request_log import RequestLog, RequestRecord

ENGINE = "0"
FINISH_REASONS = ("stop", "length", "abort", "error")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
OTHER = "other"
_COUNTED = (
    *(family for family in catalogue() if family.kind == "histogram"),
    *(vllm_names.PROMPT_TOKENS, vllm_names.GENERATION_TOKENS, vllm_names.REQUEST_SUCCESS),
    *(own_names.PROMPT_TOKENS, own_names.REQUESTS, own_names.HTTP_REQUESTS),
    *(own_names.REPAIRS, own_names.REPAIRED_TOKENS),
)
"""Metrics counted as events happen; all others are read from the engine and the server."""


class ServerMetrics:
    """All metrics of one server, in a registry of their own.

    Fill levels and the engine's counters, as of its last step, are read when /metrics is asked for; requests are
    counted as they happen. Nothing waits for the engine. Used on the event loop.
    """

    def __init__(self, readings: ServerReadings, model_name: str, records: RequestLog) -> None:
        """Subscribes to the records of ended requests; `readings` are the values read on each scrape."""
        constants = {"model_name": model_name.encode("utf-8", "replace").decode("utf-8"), "engine": ENGINE}
        self.registry = CollectorRegistry()
        self._meters = Meters(self.registry, _COUNTED, constants)
        self.registry.register(SampleCollector(readings, constants))
        ProcessCollector(registry=self.registry)
        self.refresh = readings.refresh
        """Reads what a scrape must wait for."""
        for reason in FINISH_REASONS:
            self._meters.add(vllm_names.REQUEST_SUCCESS, 0, finished_reason=reason)
        for action in own_names.ACTIONS:
            self._meters.add(own_names.PROMPT_TOKENS, 0, action=action)
        for policy in own_names.POLICIES:
            self._meters.add(own_names.REPAIRS, 0, policy=policy)
        for action in own_names.REPAIR_ACTIONS:
            self._meters.add(own_names.REPAIRED_TOKENS, 0, action=action)
        records.listen(self.observe_record)

    def expose(self, accept: str | None) -> tuple[bytes, str]:
        """Returns the text of /metrics and its content type, by the Accept header."""
        return expose(self.registry, accept)

    def observe_delta(self, delta: RequestDelta) -> None:
        """Counts the tokens of one delta as it streams, so that rates do not wait for the end of long answers."""
        meters = self._meters
        meters.add(vllm_names.GENERATION_TOKENS, sum(len(answer.token_ids) for answer in delta.answers))
        if (reuse := delta.reuse) is not None:
            meters.add(vllm_names.PROMPT_TOKENS, delta.num_prompt_tokens)
            counts = (reuse.reused_tokens - reuse.moved_tokens, reuse.moved_tokens, reuse.computed_tokens)
            for action, count in zip(own_names.ACTIONS, counts, strict=True):
                meters.add(own_names.PROMPT_TOKENS, count, action=action)
            if reuse.repair is not None:
                self._observe_repair(reuse.repair)

    def observe_record(self, record: RequestRecord) -> None:
        """Counts an ended request."""
        meters = self._meters
        meters.add(own_names.REQUESTS, route=record.route, status=record.status)
        for reason in record.finish_reasons:
            meters.add(vllm_names.REQUEST_SUCCESS, finished_reason=reason if reason in FINISH_REASONS else "error")
        if not record.finish_reasons and record.status != "complete":
            reason = "abort" if record.status == "cancelled" else "error"
            meters.add(vllm_names.REQUEST_SUCCESS, finished_reason=reason)
        for seconds in record.inter_token_seconds:
            meters.observe(vllm_names.INTER_TOKEN_LATENCY, seconds)
        if record.estimated_uncached_ttft is not None:
            meters.observe(own_names.UNCACHED_TTFT, record.estimated_uncached_ttft)
        if (reuse := record.reuse) is not None:
            meters.observe(vllm_names.REQUEST_COMPUTED_TOKENS, reuse.computed_tokens)
            if reuse.time_to_first_token is not None:
                meters.observe(vllm_names.TIME_TO_FIRST_TOKEN, reuse.time_to_first_token)
        if record.status == "complete":
            self._observe_complete(record)

    def observe_http(self, method: str, route: str, status: int) -> None:
        """Counts a reply; paths and methods that a client may choose freely are counted as "other"."""
        method = method if method in METHODS else OTHER
        self._meters.add(own_names.HTTP_REQUESTS, method=method, route=route, status=str(status))

    def _observe_repair(self, repair: RepairUse) -> None:
        meters, policy = self._meters, repair.policy.partition("(")[0]
        meters.add(own_names.REPAIRS, policy=policy if policy in own_names.POLICIES else OTHER)
        counts = (max(repair.repaired_tokens - repair.computed_tokens, 0), repair.computed_tokens)
        for action, count in zip(own_names.REPAIR_ACTIONS, counts, strict=True):
            meters.add(own_names.REPAIRED_TOKENS, count, action=action)
        meters.observe(own_names.REPAIR_SECONDS, repair.milliseconds / 1e3)

    def _observe_complete(self, record: RequestRecord) -> None:
        meters, num_answers = self._meters, len(record.finish_reasons)
        meters.observe(vllm_names.REQUEST_PROMPT_TOKENS, record.num_prompt_tokens)
        meters.observe(vllm_names.REQUEST_GENERATION_TOKENS, record.num_answer_tokens)
        meters.observe(vllm_names.NUM_ANSWERS, num_answers)
        if record.metrics is not None:
            tokens_each = record.num_answer_tokens / max(num_answers, 1)
            self._observe_times(record.metrics, tokens_each, record.priority)

    def _observe_times(self, metrics: RequestMetrics, tokens_each: float, priority: str) -> None:
        meters = self._meters
        begin, first, end = metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
        if begin is None or first is None or end is None:
            return
        meters.observe(vllm_names.LATENCY, end - metrics.arrival_time)
        meters.observe(vllm_names.QUEUE_TIME, begin - metrics.arrival_time)
        meters.observe(own_names.QUEUE_SECONDS, begin - metrics.arrival_time, priority=priority)
        meters.observe(vllm_names.PREFILL_TIME, first - begin)
        meters.observe(vllm_names.DECODE_TIME, end - first)
        meters.observe(vllm_names.INFERENCE_TIME, end - begin)
        if tokens_each > 1:
            meters.observe(vllm_names.TIME_PER_TOKEN, (end - first) / (tokens_each - 1))


class CountReplies:
    """ASGI middleware that counts every reply by method, route and status, including replies of other middleware."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path_format", OTHER)
                self._metrics.observe_http(scope["method"], route, message["status"])
            await send(message)

        await self._app(scope, receive, counting)


def router(counters: ServerMetrics) -> APIRouter:
    """Returns the route /metrics."""
    routes = APIRouter()

    @routes.get(
        "/metrics",
        summary="Metrics for Prometheus",
        dependencies=[Depends(current_admin)],
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    async def metrics(request: Request) -> Response:
        """All counters, histograms and fill levels: Prometheus' text format, or OpenMetrics by the Accept header."""
        await counters.refresh()
        text, content_type = counters.expose(request.headers.get("accept"))
        return Response(text, headers={"Content-Type": content_type, "Cache-Control": "no-store"})

    return routes
