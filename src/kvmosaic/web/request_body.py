"""Request body middleware: reads the body within its limits, and cancels the work when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from gzip import GzipFile
from io import BytesIO
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmosaic.api.json_limits import check_json, check_json_type
from kvmosaic.web.errors import ApiError, as_api_error, reply_of_error, request_id_of
from kvmosaic.web.json_body import PARSED, WARNINGS, LongBody, Warnings, add_warnings, parse_long

BODY_SECONDS = 60.0
"""Timeout to receive a body, or the next piece of an upload."""
LINGER_SECONDS = 2.0
"""How long the rest of a refused body is taken and dropped."""
MAX_UPLOADS = 8
"""Maximum number of uploads in progress."""
CLOSE = {"Connection": "close"}
MAX_BODIES = 16
"""Memory for bodies in progress, in bodies of the maximum length.

A tenant may have as much as it leaves free: half of it if it is alone, a third each if there are two. However much
other tenants hold, a new tenant gets room. Where there can be no other tenant, the one has all of it."""
SMALL_BODY_BYTES = 2**16
"""Bodies up to this size are checked on the event loop; longer ones are checked and parsed in a thread."""

READING = frozenset({"GET", "HEAD"})
UPLOADS = ("/v1/documents:batch", "/v1/files")
"""Routes that read a body piece by piece, which may be longer than others."""

logger = logging.getLogger("kvmosaic.server")


@dataclass(frozen=True)
class BodyRules:
    """What a server allows of bodies, and what its operator calls the limits."""

    max_bytes: int
    setting: str
    max_upload_bytes: int
    upload_setting: str
    full: Callable[[str, str], ApiError]
    """Returns the 429 for a reason and a code."""
    in_thread: Callable[..., Awaitable[Any]]
    """Runs a function beside the event loop, in the turn of the tenant that is its first argument."""
    tenant_of: Callable[[Scope], str]
    has_tenants: bool = True
    asking: Callable[[Scope], AbstractContextManager[None]] = lambda scope: nullcontext()
    """Counts a request before its body is parsed, or refuses it."""

    def of(self, tenant: str) -> str:
        """Returns whose requests they are, for messages; empty where there is no other tenant."""
        return f" of {tenant!r}" if self.has_tenants else ""

    def room(self, most: int, used: Mapping[str, int], tenant: str) -> int:
        """Returns how much of `most` a tenant may use, by what all of them use now."""
        num_free = max(most - sum(used.values()), 0)
        return num_free if self.has_tenants else num_free + used.get(tenant, 0)


class RequestBodyMiddleware:
    """Reads and checks request bodies, and watches for disconnects.

        receive ──▶ whole body, counted while it arrives ──▶ route
                └─▶ afterwards: client disconnected ──▶ the route is cancelled, and with it its request in the engine

    A route that fails before its reply has begun answers in the shape of its API; the exception goes to the log.
    """

    def __init__(self, app: ASGIApp, rules: BodyRules) -> None:
        self._app = app
        self._rules = rules
        self._num_bytes: dict[str, int] = {}
        """By tenant: bytes of bodies in memory."""
        self._uploads: dict[str, int] = {}
        """By tenant: uploads in progress."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] in READING:  # the body of such a request is never read, so it cannot bypass the limits
            return await _Conversation(self._app, scope, receive, send).run(b"")
        if scope["path"].removeprefix(scope.get("root_path", "")) in UPLOADS:
            return await self._upload(scope, receive, send)
        tenant = self._rules.tenant_of(scope)
        body = bytearray()
        num_bytes = 0
        try:
            is_packed = _is_packed(scope)
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    if not await self._read(receive, body, tenant):
                        return None
            except asyncio.CancelledError:
                raise _ended("the server ended before the whole body had come") from None
            if body:
                check_json_type(Headers(scope=scope).get("content-type", ""))
            with self._rules.asking(scope):
                content, num_bytes = bytes(body), len(body)
                body.clear()  # one of the two is enough
                if is_packed:
                    content = await self._rules.in_thread(tenant, self._unpacked, content)
                    self._take_room(tenant, len(content))
                    self._add(tenant, -num_bytes)
                    num_bytes = len(content)
                content, scope[PARSED], scope[WARNINGS] = await self._check(tenant, content)
                return await _Conversation(self._app, scope, receive, send).run(content)
        except TimeoutError:
            refusal = ApiError(408, f"the body did not come within {BODY_SECONDS:g} s", code="body_timeout")
            return await reply_of_error(refusal, scope)(scope, receive, send)
        except ApiError as refusal:
            return await reply_of_error(refusal, scope)(scope, receive, send)
        finally:
            self._add(tenant, -(len(body) or num_bytes))

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request whose route reads the body itself."""
        has_begun = False
        body = UploadBody(receive, self._rules.max_upload_bytes, self._rules.upload_setting)

        async def forward(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            _is_packed(scope, accepted=())
            with self._uploading(self._rules.tenant_of(scope)):
                await self._app(scope, body, forward)
        except ClientDisconnect:
            return
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError):
                error = _ended("the server ended before the whole body had come; what was read before is stored")
            refusal = as_api_error(error, request_id_of(Request(scope)))
            if not has_begun:
                await reply_of_error(refusal, scope)(scope, receive, forward)

    @contextmanager
    def _uploading(self, tenant: str) -> Iterator[None]:
        """Counts an upload of a tenant, which may have half of what others leave free, rounded up; see `room`.

        Raises:
            ApiError: 429, there are too many.
        """
        rules = self._rules
        if self._uploads.get(tenant, 0) >= rules.room(MAX_UPLOADS, self._uploads, tenant):
            raise rules.full(f"too many uploads{rules.of(tenant)} are in progress", "uploads_full")
        with counted(self._uploads, tenant):
            yield

    def _add(self, tenant: str, num_bytes: int) -> None:
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]

    def _take_room(self, tenant: str, num_bytes: int) -> None:
        """Counts bytes of a body.

        Raises:
            ApiError: 429, the tenant has no room for them.
        """
        rules = self._rules
        room = rules.room(MAX_BODIES * rules.max_bytes - num_bytes, self._num_bytes, tenant)
        if self._num_bytes.get(tenant, 0) + num_bytes > room:
            raise rules.full(f"requests{rules.of(tenant)} that are being read are too large together", "bodies_full")
        self._add(tenant, num_bytes)

    def _too_long(self, form: str) -> ApiError:
        limit = f"{self._rules.max_bytes} bytes ({self._rules.setting})"
        told = f"the body is longer than {limit}{form}; send less at once"
        return ApiError(413, told, code="body_too_large", headers=CLOSE)

    def _unpacked(self, body: bytes) -> bytes:
        """Returns what a body in gzip's format contains, and unpacks no more than a body may have.

        Raises:
            ApiError: 400, it is not in this format; 413, it contains too much.
        """
        most = self._rules.max_bytes
        try:
            with GzipFile(fileobj=BytesIO(body)) as packed:
                content = packed.read(most + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise ApiError(400, f"the body is not gzip, as its Content-Encoding says: {error}") from None
        if len(content) > most:
            raise self._too_long(" when it is unpacked")
        return content

    async def _read(self, receive: Receive, body: bytearray, tenant: str) -> bool:
        """Fills `body`; returns False if the client disconnected before its end. Ignores the declared length."""
        most = self._rules.max_bytes
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            if len(body) + len(part) > most:
                raise self._too_long("")
            self._take_room(tenant, len(part))
            body += part
            if not message.get("more_body", False):
                return True

    async def _check(self, tenant: str, body: bytes) -> tuple[bytes, LongBody | None, Warnings]:
        """Checks the body; returns it, as Python if it was parsed, and warnings about its texts."""
        if len(body) <= SMALL_BODY_BYTES:
            body, warnings = check_json(body)
            return body, None, warnings
        in_thread = partial(self._rules.in_thread, tenant)
        parsed, warnings = await in_thread(parse_long, body)
        return body, LongBody(parsed.pop(), in_thread) if parsed else None, warnings


def _is_packed(scope: Scope, *, accepted: Sequence[str] = ("gzip", "x-gzip")) -> bool:
    """Whether the body of a request is compressed.

    Raises:
        ApiError: 415, in another way than is accepted.
    """
    said = Headers(scope=scope).get("content-encoding", "").strip().lower()
    if said in ("", "identity"):
        return False
    if said not in accepted:
        told = f"the header Content-Encoding says {said[:100]!r}; send {'gzip, or ' if accepted else ''}no compression"
        raise ApiError(415, told, code="invalid_content_encoding", headers=CLOSE)
    return True


def lingering(scope: Scope, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """`receive` and `send` with which a reply that comes before the whole body ends once that has come, too.

    A server closes the connection after such a reply, and a client that reads once it has sent all would see a reset.
    """
    headers = Headers(scope=scope)
    is_whole = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

    async def received() -> Message:
        nonlocal is_whole
        message = await receive()
        is_whole = not message.get("more_body", False)
        return message

    async def sent(message: Message) -> None:
        if not is_whole and message["type"] == "http.response.body" and not message.get("more_body"):
            await send({**message, "more_body": True})
            message = {"type": "http.response.body"}
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while not is_whole:
                        await received()
        await send(message)

    return received, sent


class UploadBody:
    """The `receive` of a request whose route reads the body itself."""

    def __init__(self, receive: Receive, max_bytes: int, setting: str) -> None:
        """`setting`: what the operator calls `max_bytes`, for errors."""
        self._receive = receive
        self._max_bytes = max_bytes
        self._setting = setting
        self._num_bytes = 0
        self._is_whole = False

    async def __call__(self) -> Message:
        """The next piece; after the last one, the client's messages.

        Raises:
            ApiError: 408, nothing came for too long; 413, the body is too long.
        """
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await self._receive()
        except TimeoutError:
            told = f"nothing of the body came for {BODY_SECONDS:g} s; what was read before is stored"
            raise ApiError(408, told, code="body_timeout", headers=CLOSE) from None
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            limit = f"{self._max_bytes} bytes ({self._setting})"
            told = f"the body is longer than {limit}; send it in parts. What was read before is stored"
            raise ApiError(413, told, code="body_too_large", headers=CLOSE)
        self._is_whole = not message.get("more_body", False)
        return message


def _ended(told: str) -> ApiError:
    """The reply to a request whose task was cancelled before it was read, as it is when the server ends."""
    return ApiError(503, told, type="service_unavailable", code="unavailable", headers=CLOSE)


class _Conversation:
    """One request with a complete body, and its reply."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        self._gone = asyncio.Event()
        self._has_begun = False
        self._is_answered = False

    async def run(self, body: bytes) -> None:
        """Runs the route until it has replied or the client has disconnected."""
        task = asyncio.current_task()
        assert task is not None
        unread = [body]

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        watcher = asyncio.create_task(self._watch(task), name="client-watcher")
        try:
            await self._app(self._scope, replay, self._forward)
        except asyncio.CancelledError:
            if not self._gone.is_set():
                raise
            task.uncancel()
        except Exception as error:
            refusal = as_api_error(error, request_id_of(Request(self._scope)))
            if not self._has_begun:  # otherwise the connection is closed in the middle of the reply
                await reply_of_error(refusal, self._scope)(self._scope, replay, self._forward)
        finally:
            watcher.cancel()

    async def _watch(self, task: asyncio.Task[None]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._is_answered:
            self._gone.set()
            task.cancel()

    async def _forward(self, message: Message) -> None:
        self._has_begun = True
        if message["type"] == "http.response.start":
            add_warnings(message, self._scope.get(WARNINGS, ()))
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True
        await self._send(message)


@contextmanager
def counted(counts: dict[str, int], name: str, number: int = 1) -> Iterator[None]:
    """Counts something of a name while the block runs."""
    counts[name] = counts.get(name, 0) + number
    try:
        yield
    finally:
        counts[name] -= number
        if not counts[name]:
            del counts[name]
