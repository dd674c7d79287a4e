"""Tracing middleware: one trace per HTTP request, except for probes and scrapes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmosaic.server.middleware.startup import reads_figures

if TYPE_CHECKING:
    from kvmosaic.server.tracing.export import Tracing


class TracingMiddleware:
    """Begins the trace of a request, passes it on as `request.state.trace`, and ends it with the reply."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        from kvmosaic.server.tracing.request_trace import ReplyState  # imports OpenTelemetry

        self._app = app
        self._tracing = tracing
        self._new_reply = ReplyState

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http" or reads_figures(scope):
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        parents, states = headers.getlist("traceparent"), headers.getlist("tracestate")
        trace = self._tracing.begin(scope["method"], parents, states)
        if trace is None:
            return await self._app(scope, receive, send)
        reply = self._new_reply()
        scope.setdefault("state", {})["trace"] = trace

        async def watched() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not reply.is_complete:
                reply.has_client_left = True
            return message

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                reply.status, reply.route = message["status"], getattr(scope.get("route"), "path_format", None)
            elif not message.get("more_body", False):
                reply.is_complete = True
            await send(message)

        try:
            return await self._app(scope, watched, noted)
        finally:
            # a path with names of documents in it is not recorded, nor one that a client made up
            path = scope["path"] if reply.route is not None and "{" not in reply.route else None
            http = {
                "url.path": path,
                "url.scheme": scope["scheme"],
                "network.protocol.version": scope["http_version"],
            }
            trace.end(reply, scope["state"].get("request_id", ""), http)
