"""Export of spans: a provider of this server's own, and the thread that sends its spans in batches."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from requests import PreparedRequest, Response, Session
from requests.adapters import HTTPAdapter

from kvmosaic import __version__
from kvmosaic.errors import InvalidConfig
from kvmosaic.server.tracing.request_trace import RequestTrace
from kvmosaic.tiers.tier import Notices

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

    def flush(self) -> None:
        """Sends all spans that have ended; blocks."""
        self._processor.force_flush()

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
