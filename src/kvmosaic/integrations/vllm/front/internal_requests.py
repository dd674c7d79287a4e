"""Requests to the wrapped app with the headers of the client's request, bodies of requests, and their errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope

from kvmosaic.api.errors import ApiError, for_clients, known_error


def api_error(error: Exception, places: Sequence[int] = ()) -> ApiError:
    """The error that a client sees; `places`: see `known_error`."""
    return known_error(error, places) or ApiError(500, for_clients(str(error)))


async def whole_body(receive: Receive, max_bytes: int, way_out: str) -> bytes | None:
    """Reads the body of a request; None if the client disconnected before its end.

    Raises:
        ApiError: 413, it is longer than `max_bytes`; the message ends with `way_out`.
    """
    content = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        content += message.get("body", b"")
        if len(content) > max_bytes:
            raise ApiError(413, f"the body is longer than {max_bytes} bytes{way_out}", code="body_too_large")
        if not message.get("more_body", False):
            return bytes(content)


async def ask(app: ASGIApp, scope: Scope, method: str, path: str, body: Any = None) -> Response:
    """Sends a request with the same headers to another path of the app, and returns its reply."""
    content = b"" if body is None else json.dumps(body).encode()
    kept = [pair for pair in scope["headers"] if pair[0].lower() not in (b"content-length", b"content-type")]
    headers = [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    root = scope.get("root_path", "")
    other = {
        **scope,
        "method": method,
        "path": root + path,
        "raw_path": (root + path).encode(),
        "query_string": b"",
        "headers": headers,
        "state": dict(scope.get("state") or {}),
    }
    parts = [{"type": "http.request", "body": content, "more_body": False}]
    replied: list[Message] = []

    async def receive() -> Message:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()  # never reports a disconnect before the reply
        raise AssertionError

    async def send(message: Message) -> None:
        replied.append(message)

    await app(other, receive, send)
    start = next(message for message in replied if message["type"] == "http.response.start")
    content = b"".join(message.get("body", b"") for message in replied if message["type"] == "http.response.body")
    reply = Response(content, start["status"])
    reply.raw_headers = list(start.get("headers", []))
    return reply
