"""Headers of every reply, and the access log, which has a line for it."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmosaic.server.process.logs import FIELDS, PROBES
from kvmosaic.web.errors import refusal_of

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
