"""Response headers middleware: every reply carries the request's id and the security headers for browsers."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
