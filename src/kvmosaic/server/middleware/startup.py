"""Startup middleware: answers while the app is loading, then throttles requests into it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvmosaic.server.middleware.access_log import AccessLogMiddleware, ResponseHeadersMiddleware
from kvmosaic.server.process.logs import PROBES
from kvmosaic.server.tenants.access import Tenants, authorization_of
from kvmosaic.web.errors import ApiError, reply_of_error

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
    await _reply_while_loading(scope)(scope, receive, send)


def _reply_while_loading(scope: Scope) -> Response:
    path = _path_of(scope)
    retry = {"Retry-After": LOADING_RETRY_SECONDS}
    if path == "/livez":
        return JSONResponse({"status": "ok"})
    if path in PROBES:
        return JSONResponse({"status": "loading"}, 503, headers=retry)
    message = "the model is still being loaded; try again soon"
    error = ApiError(503, message, type="service_unavailable", code="loading", headers=retry)
    return reply_of_error(error, scope)
