"""Access log: one line per request, with its id, status and duration, and why it was refused."""

from __future__ import annotations

import logging
import time
from typing import Any
from urllib.parse import quote

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
