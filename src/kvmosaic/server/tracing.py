"""Spans of requests, for OpenTelemetry: one trace per HTTP request, from the engine's timestamps, sent in batches.

It imports OpenTelemetry, so it is imported only if `--otlp-traces-endpoint` is set.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from requests import PreparedRequest, Response, Session
from requests.adapters import HTTPAdapter

from kvmosaic import __version__
from kvmosaic.errors import InvalidConfig
from kvmosaic.sampling import Period, RequestMetrics, ReuseReport, SamplingParams
from kvmosaic.server.metrics.prometheus import METHODS
from kvmosaic.server.metrics.request_log import RequestRecord
from kvmosaic.tiers.tier import Notices

READING = ("GET", "HEAD")
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
"""`gen_ai.operation.name`, by route."""


@dataclass(slots=True)
class ReplyState:
    """How far the reply to a request has come."""

    route: str | None = None
    """Template of the path, such as /v1/documents/{document_id}; None for an unknown address."""
    status: int | None = None
    is_complete: bool = False
    has_client_left: bool = False


class RequestTrace:
    """The spans of one HTTP request.

        request  ├────────────────────────────────────────────────────────┤
        plan       ├──┤            layout
        load           ├─────────┤ from the tiers, if chunks were fetched
        lookup              ├──┤   cached tokens found, blocks allocated
        prefill                   ├────────┤
        decode                             ├────────────────────────────┤

    The stages are recorded when a prompt has ended, from the engine's timestamps. Names and numbers only: no text, no
    name of a document, no key. Used on the event loop.
    """

    def __init__(
        self, tracer: Tracer, parent: Context, method: str, model_name: str, clock: Callable[[], float]
    ) -> None:
        """Begins the span of the request, now on the engine's clock."""
        begin = clock()
        self._tracer = tracer
        self._clock = clock
        self._model_name = model_name
        self._offset = time.time_ns() - _nanoseconds(begin)
        """From the engine's clock to wall time: read once, so that the spans of a request are in order."""
        self._method = method if method in METHODS else None
        self._records: dict[int, RequestRecord] = {}
        self._span = tracer.start_span(
            self._method or "HTTP",
            parent,
            SpanKind.SERVER,
            {"http.request.method": self._method or "_OTHER"},
            start_time=self._at(begin),
        )
        self._context = set_span_in_context(self._span, Context())

    @property
    def is_recording(self) -> bool:
        """Whether the request is sampled."""
        return self._span.is_recording()

    def describe(self, route: str, model: str | None, params: SamplingParams, *, stream: bool) -> None:
        """Adds what the request asks of the model."""
        asked: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": OPERATIONS.get(route),
            "gen_ai.provider.name": "kvmosaic",
            "gen_ai.request.model": model or self._model_name,
            "gen_ai.response.model": model or self._model_name,
            "gen_ai.request.choice.count": params.n if params.n != 1 else None,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.stream": stream,
        }
        self._set(asked)

    def add(self, prompt_index: int, record: RequestRecord) -> None:
        """Adds the stages of an ended prompt."""
        self._records[prompt_index] = record
        if (metrics := record.metrics) is not None:
            for name, period, attributes in _stages(record, metrics, self._clock()):
                span = self._tracer.start_span(
                    name,
                    self._context,
                    attributes={"kvmosaic.prompt_index": prompt_index, **attributes},
                    start_time=self._at(period.begin),
                )
                span.end(self._at(period.end))

    def end(self, reply: ReplyState, request_id: str, http: Mapping[str, str | None]) -> None:
        """Ends the span of the request.

        Args:
            reply: its reply, as far as it was sent.
            request_id: as in the X-Request-Id header of the reply.
            http: further attributes of the HTTP request.
        """
        if reply.route is not None:
            self._span.update_name(f"{self._method or 'HTTP'} {reply.route}")
        self._set({**http, "http.route": reply.route, "http.response.status_code": reply.status})
        self._set({"gen_ai.request.id": request_id or None})
        self._set(_totals([self._records[index] for index in sorted(self._records)]))
        error, is_failure = self._error(reply)
        self._set({"error.type": error})
        if is_failure:
            self._span.set_status(StatusCode.ERROR)
        self._span.end(self._at(self._clock()))

    def _error(self, reply: ReplyState) -> tuple[str | None, bool]:
        """Returns the class of the error, if any, and whether it sets the span's status.

        As HTTP's conventions have it, a refused request (4xx) leaves the status of a server's span unset.
        """
        if not reply.is_complete and reply.has_client_left and self._method in READING:
            return None, False  # how a stream of events for a page ends
        if not reply.is_complete:
            return "client_disconnected" if reply.has_client_left else "incomplete_reply", True
        status = reply.status or 0
        known = next((record.error for record in self._records.values() if record.error), None)
        if known is None and any("abort" in record.finish_reasons for record in self._records.values()):
            known = "aborted"
        if status >= 400:
            return known or str(status), status >= 500
        return known, known is not None  # an error in the middle of a stream

    def _set(self, attributes: Mapping[str, AttributeValue | None]) -> None:
        for name, value in attributes.items():
            if value is not None:
                self._span.set_attribute(name, value)

    def _at(self, seconds: float) -> int:
        """Unix nanoseconds of a time on the engine's clock."""
        return self._offset + _nanoseconds(seconds)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _stages(
    record: RequestRecord, metrics: RequestMetrics, now: float
) -> Iterable[tuple[str, Period, dict[str, AttributeValue]]]:
    """Yields name, time and attributes of each stage that a prompt has reached."""
    reuse = record.reuse or ReuseReport()
    if metrics.plan is not None:
        about: dict[str, AttributeValue] = {
            "kvmosaic.documents": _num_documents(reuse),
            "kvmosaic.composition": reuse.composition,
        }
        yield "plan", metrics.plan, about
    loaded = [segment for segment in reuse.segments if segment.tier not in (None, "device")]
    num_loaded = sum(segment.reused_tokens for segment in loaded)
    if metrics.load is not None:
        tiers = sorted({segment.tier for segment in loaded if segment.tier})
        yield "load", metrics.load, {"kvmosaic.loaded_tokens": num_loaded, "kvmosaic.tiers": tiers}
    if metrics.lookup is not None:
        yield "lookup", metrics.lookup, {"kvmosaic.found_tokens": reuse.reused_tokens - num_loaded}
    begin, first, end = metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time
    if begin is not None and first is not None:
        yield "prefill", Period(begin, first), {"kvmosaic.computed_tokens": reuse.computed_tokens}
        decode = Period(first, now if end is None else end)
        yield "decode", decode, {"gen_ai.usage.output_tokens": record.num_answer_tokens}


def _totals(records: list[RequestRecord]) -> dict[str, AttributeValue | None]:
    """Attributes of a request over all its prompts."""
    if not records:
        return {}
    reports = [record.reuse for record in records if record.reuse is not None]
    times = [record.metrics for record in records if record.metrics is not None]
    totals: dict[str, AttributeValue | None] = {
        "gen_ai.usage.input_tokens": sum(record.num_prompt_tokens for record in records),
        "gen_ai.usage.output_tokens": sum(record.num_answer_tokens for record in records),
        "gen_ai.response.finish_reasons": [reason for record in records for reason in record.finish_reasons],
        "gen_ai.latency.time_in_queue": _longest(metrics.time_in_queue for metrics in times),
        "gen_ai.latency.time_to_first_token": _longest(metrics.time_to_first_token for metrics in times),
        "gen_ai.latency.e2e": _longest(metrics.total_time for metrics in times),
    }
    if reports:
        num_reused = sum(reuse.reused_tokens for reuse in reports)
        totals |= {
            "gen_ai.usage.cache_read.input_tokens": num_reused,
            "kvmosaic.reused_tokens": num_reused,
            "kvmosaic.moved_tokens": sum(reuse.moved_tokens for reuse in reports),
            "kvmosaic.computed_tokens": sum(reuse.computed_tokens for reuse in reports),
            "kvmosaic.documents": sum(map(_num_documents, reports)),
            "kvmosaic.composition": " | ".join(dict.fromkeys(reuse.composition for reuse in reports)),
        }
    return totals


def _num_documents(reuse: ReuseReport) -> int:
    return sum(segment.kind == "chunk" for segment in reuse.segments)


def _longest(seconds: Iterable[float | None]) -> float | None:
    return max((each for each in seconds if each is not None), default=None)


FLUSH_SECONDS = 5.0
"""Maximum time for sending the last spans at shutdown."""
MAX_HEADER_CHARACTERS = 512
"""Maximum length of `traceparent`, and of all `tracestate` together; longer ones are ignored."""
MAX_MESSAGE_CHARACTERS = 300
MAX_REPLY_BYTES = 2**16

logger = logging.getLogger("kvmosaic.server")


class Tracing:
    """Traces of one server.

        event loop     begin ──▶ RequestTrace ──▶ spans ──▶ queue (full: the oldest are dropped)
        its thread                                            └──▶ batches ──▶ endpoint

    The provider is not the global one, so other libraries of the process record nothing through it. Sampling, queue,
    headers and the service's name follow OpenTelemetry's environment variables.
    """

    def __init__(
        self, endpoint: str, model_name: str, clock: Callable[[], float], *, exporter: SpanExporter | None = None
    ) -> None:
        """Starts the thread that sends.

        Args:
            endpoint: URL of the OTLP endpoint.
            model_name: the model's name, for requests that name none.
            clock: the engine's clock.
            exporter: receives the spans in place of the endpoint.

        Raises:
            InvalidConfig: a variable of OpenTelemetry has a value that cannot be used.
        """
        self._model_name = model_name
        self._clock = clock
        self._propagator = TraceContextTextMapPropagator()
        try:
            session = None if any("CREDENTIAL_PROVIDER" in name for name in os.environ) else _bounded_session()
            self._exporter = exporter or OTLPSpanExporter(endpoint=endpoint, session=session)
            self._processor = BatchSpanProcessor(self._exporter)
            self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        except ValueError as error:
            raise InvalidConfig(f"tracing cannot start: an OTEL_ variable is wrong: {error}") from error
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("kvmosaic", __version__)
        self._messages = _Messages(endpoint)
        self._messages.attach()

    def begin(self, method: str, traceparents: Sequence[str], tracestates: Sequence[str]) -> RequestTrace | None:
        """Begins the trace of a request, as part of the trace that its headers name; None if it is not sampled."""
        context = self._context(traceparents, tracestates)
        trace = RequestTrace(self._tracer, context, method, self._model_name, self._clock)
        return trace if trace.is_recording else None

    def close(self) -> None:
        """Sends the last spans, for a few seconds at most; blocks. Later spans are dropped."""
        closing = threading.Thread(target=self._shut_down, name="kvmosaic-spans", daemon=True)
        closing.start()
        closing.join(FLUSH_SECONDS)
        if closing.is_alive():
            logger.warning("the last spans of requests could not be sent within %g s", FLUSH_SECONDS)
            self._exporter.shutdown()  # ends its retries

    def _shut_down(self) -> None:
        self._provider.shutdown()
        self._messages.detach()  # last, since all of this may log

    def _context(self, traceparents: Sequence[str], tracestates: Sequence[str]) -> Context:
        """Reads W3C trace context; baggage is not read, since nothing here uses it."""
        if len(traceparents) != 1 or len(traceparents[0]) > MAX_HEADER_CHARACTERS:
            return Context()
        carrier = {"traceparent": list(traceparents)}
        if tracestates and sum(map(len, tracestates)) <= MAX_HEADER_CHARACTERS:
            carrier["tracestate"] = list(tracestates)
        return self._propagator.extract(carrier, Context())


class _BoundedReplies(HTTPAdapter):
    """Sends, and reads so much of a reply only: a collector may write without end."""

    def send(self, request: PreparedRequest, stream: bool = False, **options: Any) -> Response:  # type: ignore[override]
        """Returns the reply, cut off."""
        reply = super().send(request, stream=True, **options)
        with reply:
            reply._content = reply.raw.read(MAX_REPLY_BYTES, decode_content=False)
        return reply


def _bounded_session() -> Session:
    session = Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _BoundedReplies())
    return session


def _resource() -> Resource:
    """Describes this service, as far as the environment does not."""
    given = OTELResourceDetector().detect().attributes
    own = {SERVICE_NAME: "kvmosaic", SERVICE_VERSION: __version__}
    return Resource.create({name: value for name, value in own.items() if name not in given})


class _Messages(logging.Handler):
    """Log handler for OpenTelemetry's own messages: one line a minute, whatever fails how often."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(logging.WARNING)
        self._endpoint = endpoint
        self._notices = Notices(logger)
        self._logger = logging.getLogger("opentelemetry")
        self._did_propagate = self._logger.propagate

    def attach(self) -> None:
        """Takes the messages of this process."""
        self._logger.addHandler(self)
        self._logger.propagate = False

    def detach(self) -> None:
        """Leaves them to others again."""
        self._logger.removeHandler(self)
        self._logger.propagate = self._did_propagate

    def emit(self, record: logging.LogRecord) -> None:
        """Logs a message, unless there was one within a minute; headers that a client sent wrong hinder no span."""
        if record.name.startswith("opentelemetry.trace"):
            return
        message = record.getMessage()[:MAX_MESSAGE_CHARACTERS]
        self._notices.warn("spans", f"spans of requests are not sent to {self._endpoint}: {message}")
