"""Internal requests to the wrapped app, with the headers of the client's request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from kvmosaic.integrations.vllm.front.error_replies import Refusal

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class HTTPReply:
    """A complete HTTP reply."""

    status: int
    headers: list[tuple[bytes, bytes]]
    content: bytes

    async def send(self, send: Send) -> None:
        """Sends it through another `send`."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.content})


def json_reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> HTTPReply:
    """Builds a JSON reply."""
    content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    said = {"content-type": "application/json", "content-length": str(len(content)), **(headers or {})}
    return HTTPReply(status, [(name.encode(), value.encode()) for name, value in said.items()], content)


async def whole_body(receive: Receive, max_bytes: int, way_out: str) -> bytes | None:
    """Reads the body of a request; None if the client disconnected before its end.

    Raises:
        Refusal: 413, it is longer than `max_bytes`; the message ends with `way_out`.
    """
    content = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        content += message.get("body", b"")
        if len(content) > max_bytes:
            raise Refusal(413, f"the body is longer than {max_bytes} bytes{way_out}", code="body_too_large")
        if not message.get("more_body", False):
            return bytes(content)


async def ask(app: App, scope: Scope, method: str, path: str, body: Any = None) -> HTTPReply:
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
    return HTTPReply(start["status"], list(start.get("headers", [])), content)
