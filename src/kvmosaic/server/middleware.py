"""ASGI middleware that every request passes before its route.

From the outside in: `StartupMiddleware` (with throttling), `TracingMiddleware` (if spans are sent), `response_headers`,
the access log, `AuthenticationMiddleware`, and `web.request_body`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections import OrderedDict, deque
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmosaic.server.process.logs import FIELDS, PROBES
from kvmosaic.server.settings import ServerSettings
from kvmosaic.server.tenants.access import Tenants, authorization_of
from kvmosaic.web.errors import ApiError, refusal_of, reply_of_error
from kvmosaic.web.request_body import READING, lingering

if TYPE_CHECKING:
    from kvmosaic.server.tracing import Tracing


MAX_PATH_CHARACTERS = 500
MAX_REASON_CHARACTERS = 300
"""A reason may quote the request, so it is cut."""

logger = logging.getLogger("kvmosaic.access")


class AccessLogMiddleware:
    """Logs each request when its reply has ended, or its client has left; probes on the level "debug"."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on."""
        level = logging.DEBUG if scope["path"].endswith(PROBES) else logging.INFO
        if scope["type"] != "http" or not logger.isEnabledFor(level):
            return await self._app(scope, receive, send)
        begin, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            _log(level, scope, status, time.perf_counter() - begin)


def _log(level: int, scope: Scope, status: int, seconds: float) -> None:
    host, port = scope.get("client") or ("", 0)
    fields: dict[str, Any] = {
        "client": f"{host}:{port}" if host else "",
        "method": scope["method"],
        "path": quote(scope["path"], safe="/:")[:MAX_PATH_CHARACTERS],
        "status": status,
        "milliseconds": round(seconds * 1e3, 1),
        "request_id": scope["state"].get("request_id", ""),
    }
    line = '{client} "{method} {path}" {status} in {milliseconds} ms, request {request_id}'.format_map(fields)
    if (refusal := refusal_of(scope)) is not None:
        fields["reason"] = ascii(refusal.message[:MAX_REASON_CHARACTERS])[1:-1]
        line += f": {fields['reason']}"
    logger.log(level, line, extra={FIELDS: fields})


_GIVEN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
"""Security headers; a route may set its own value for any of them."""


class ResponseHeadersMiddleware:
    """Gives every request an id, from its X-Request-Id header if that is harmless, and every reply the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def stamp(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                headers["Request-Id"] = request_id  # its name in Anthropic's API
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        return await self._app(scope, receive, stamp)


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _GIVEN_ID.fullmatch(given) else uuid.uuid4().hex


OPEN_PATHS = frozenset({*PROBES, "/", "/favicon.ico", "/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css"})
"""Paths that need no key: the probes, the dashboard's page and that of the API, which hold no data."""
LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class AuthenticationMiddleware:
    """Identifies the tenant before routing, so that no route can be forgotten."""

    def __init__(self, app: ASGIApp, tenants: Tenants, settings: ServerSettings) -> None:
        self._app = app
        self._tenants = tenants
        self._settings = settings
        self._names = LOOPBACK_NAMES | {name.lower() for name in (settings.host, *settings.allowed_hosts)}
        self._checks_host = _is_loopback(settings.host) and not tenants.needs_key and "*" not in settings.allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or replies with 401 or 403."""
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ApiError as refusal:
                return await reply_of_error(refusal, scope)(scope, receive, send)
        return await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        connection = HTTPConnection(scope)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["method"] in READING and path in OPEN_PATHS:
            return
        connection.state.tenant = self._tenants.identify(authorization_of(connection.headers))
        if self._checks_host:
            self._check_host(connection)
        if scope["method"] not in READING:
            self._check_origin(connection)

    def _check_host(self, connection: HTTPConnection) -> None:
        """Refuses foreign Host headers: without keys, a page could point its name at this address (DNS rebinding)."""
        host = connection.headers.get("host")
        if host is None or _name_of(host) in self._names:  # browsers always send it
            return
        names = f"this server answers to localhost and {self._settings.host}, not to {host[:255]!r}"
        raise ApiError(403, f"{names}; see --allowed-hosts, or set a key", code="host")

    def _check_origin(self, connection: HTTPConnection) -> None:
        """Refuses foreign origins: without keys, a page of any site could make a visitor's browser change the store."""
        origin = connection.headers.get("origin")
        if origin is None or self._tenants.needs_key:
            return
        allowed = self._settings.allowed_origins
        if "*" in allowed or origin in allowed or urlsplit(origin).netloc == connection.headers.get("host"):
            return
        raise ApiError(403, "pages of other sites may not use this server; see --allowed-origins", code="origin")


_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9._-]{1,255}))(?::[0-9]{1,5})?")


def _name_of(host: str) -> str | None:
    """Returns the name in a Host header, without its port; None if malformed."""
    match = _HOST.fullmatch(host)
    return None if match is None else (match[1] or match[2]).lower()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class TracingMiddleware:
    """Begins the trace of a request, passes it on as `request.state.trace`, and ends it with the reply."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        from kvmosaic.server.tracing import ReplyState  # imports OpenTelemetry

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


AT_ONCE = 2
"""Requests admitted per event-loop tick; each takes the loop a few milliseconds."""


class Throttle:
    """Admits `AT_ONCE` requests per event-loop tick, round-robin over tenants, FIFO within a tenant.

    A burst of one tenant does not delay the others. Without the limit, the first steps of a hundred requests would run
    as one piece: the loop polls for new requests only when all ready callbacks have run. Used on the event loop only.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant, the next tenant first."""
        self._num_let_in = 0
        self._is_turning = False

    async def enter(self, tenant: str) -> None:
        """Waits until this request of a tenant is admitted; safe to cancel."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
        if self._num_let_in < AT_ONCE and not self._waiting:
            self._num_let_in += 1
            return
        place = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs once per event-loop tick while requests arrive."""
        self._is_turning = bool(self._num_let_in or self._waiting)
        self._num_let_in = 0
        while self._waiting and self._num_let_in < AT_ONCE:
            tenant, places = next(iter(self._waiting.items()))
            place = places.popleft()
            self._waiting.move_to_end(tenant)
            if not places:
                del self._waiting[tenant]
            if not place.done():
                place.set_result(None)
                self._num_let_in += 1
        if self._is_turning:
            loop.call_soon(self._turn, loop)


LOADING_RETRY_SECONDS = "2"
FIGURES = frozenset({*PROBES, "/metrics"})
"""Cheap paths for monitoring: they bypass the throttle."""


class StartupMiddleware:
    """ASGI app that listens from the start: alive, not ready, and delegating to the app once opened."""

    def __init__(self) -> None:
        self._app: ASGIApp = ResponseHeadersMiddleware(AccessLogMiddleware(_answer_while_loading))
        self._throttle = Throttle()
        self._tenants: Tenants | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request; probes and scrapes bypass the throttle."""
        if scope["type"] == "http" and not reads_figures(scope):
            await self._throttle.enter(self._tenant_of(scope))
            receive, send = lingering(scope, receive, send)
        await self._app(scope, receive, send)

    def open(self, app: ASGIApp, tenants: Tenants) -> None:
        """Delegates all further requests to `app`, throttled per tenant; requests without a key count as one tenant."""
        self._app, self._tenants = app, tenants

    def _tenant_of(self, scope: Scope) -> str:
        try:
            return self._tenants.identify(authorization_of(Headers(scope=scope))).name if self._tenants else ""
        except ApiError:  # the app will report it
            return ""


def reads_figures(scope: Scope) -> bool:
    """Whether a request is a probe or a scrape."""
    return scope["method"] in ("GET", "HEAD") and _path_of(scope) in FIGURES


def _path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _answer_while_loading(scope: Scope, receive: Receive, send: Send) -> None:
    path, retry = _path_of(scope), {"Retry-After": LOADING_RETRY_SECONDS}
    message = "the model and the documents are still being loaded; try again soon"
    reply = reply_of_error(ApiError(503, message, type="service_unavailable", code="loading", headers=retry), scope)
    if path == "/livez":
        reply = JSONResponse({"status": "ok"})
    elif path in PROBES:
        reply = JSONResponse({"status": "loading"}, 503, headers=retry)
    await reply(scope, receive, send)
