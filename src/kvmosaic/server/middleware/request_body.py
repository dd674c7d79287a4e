"""Request body middleware: reads the body within its limits, and cancels the work when the client disconnects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmosaic.api.error_forms import MESSAGES_ROUTE
from kvmosaic.api.json_limits import check_json, check_json_type
from kvmosaic.api.upload_body import CLOSE, MAX_UPLOADS, UploadBody
from kvmosaic.server.admission import Admission, RequestThreads
from kvmosaic.server.errors import ApiError, as_api_error, reply_of_error, request_id_of
from kvmosaic.server.json_body import PARSED, LongBody, parse_long
from kvmosaic.server.middleware.authentication import READING

BODY_SECONDS = 60.0
"""Timeout to receive a body."""
MAX_BODIES = 16
"""Memory for bodies in progress, in bodies of the maximum length.

A tenant may have as much as it leaves free: half of it if it is alone, a third each if there are two. However much
other tenants hold, a new tenant gets room."""
SMALL_BODY_BYTES = 2**16
"""Bodies up to this size are checked on the event loop; longer ones are checked and parsed in a thread."""

ASKING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES_ROUTE)
"""Routes that run the engine."""
UPLOADS = ("/v1/documents:batch", "/v1/files")
"""Routes that read a body piece by piece, which may be longer than others."""

logger = logging.getLogger("kvmosaic.server")


class RequestBodyMiddleware:
    """Reads and checks request bodies, and watches for disconnects.

        receive ──▶ whole body, counted while it arrives ──▶ route
                └─▶ afterwards: client disconnected ──▶ the route is cancelled, and with it its request in the engine

    A route that fails before its reply has begun answers in the shape of its API; the exception goes to the log.
    """

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        threads: RequestThreads,
        max_body_bytes: int,
        max_upload_bytes: int,
    ) -> None:
        self._app = app
        self._admission = admission
        self._threads = threads
        self._max_body_bytes = max_body_bytes
        self._max_upload_bytes = max_upload_bytes
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
        tenant = Request(scope).state.tenant
        body = bytearray()
        num_bytes = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                if not await self._read(receive, body, tenant.name):
                    return None
            if body:
                check_json_type(Headers(scope=scope).get("content-type", ""))
            asks = scope["method"] == "POST" and scope["path"].endswith(ASKING)
            with self._admission.asking(tenant) if asks else nullcontext():
                content, num_bytes = bytes(body), len(body)
                body.clear()  # one of the two is enough
                scope[PARSED] = await self._check(tenant.name, content)
                return await _Conversation(self._app, scope, receive, send).run(content)
        except TimeoutError:
            refusal = ApiError(408, f"the body did not come within {BODY_SECONDS:g} s", code="body_timeout")
            return await reply_of_error(refusal, scope)(scope, receive, send)
        except ApiError as refusal:
            return await reply_of_error(refusal, scope)(scope, receive, send)
        finally:
            self._add(tenant.name, -(len(body) or num_bytes))

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request whose route reads the body itself."""
        has_begun = False
        body = UploadBody(receive, self._max_upload_bytes, "--max-documents-bytes", BODY_SECONDS)

        async def forward(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            with self._uploading(Request(scope).state.tenant.name):
                await self._app(scope, body, forward)
        except ClientDisconnect:
            return
        except Exception as error:
            refusal = as_api_error(error, request_id_of(Request(scope)))
            if not has_begun:
                await reply_of_error(refusal, scope)(scope, receive, forward)

    @contextmanager
    def _uploading(self, tenant: str) -> Iterator[None]:
        """Counts an upload of a tenant, which may have half of what others leave free, rounded up.

        Raises:
            ApiError: 429, there are too many.
        """
        num_free = MAX_UPLOADS - sum(self._uploads.values())
        if self._uploads.get(tenant, 0) >= max(num_free, 0):
            raise self._admission.full(f"too many uploads of {tenant!r} are in progress", "uploads_full")
        self._uploads[tenant] = self._uploads.get(tenant, 0) + 1
        try:
            yield
        finally:
            self._uploads[tenant] -= 1
            if not self._uploads[tenant]:
                del self._uploads[tenant]

    def _add(self, tenant: str, num_bytes: int) -> None:
        self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + num_bytes
        if not self._num_bytes[tenant]:
            del self._num_bytes[tenant]

    async def _read(self, receive: Receive, body: bytearray, tenant: str) -> bool:
        """Fills `body`; returns False if the client disconnected before its end. Ignores the declared length."""
        most = self._max_body_bytes
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            part = message.get("body", b"")
            if len(body) + len(part) > most:
                raise ApiError(
                    413,
                    f"the body is longer than {most} bytes (--max-body-bytes); send less at once",
                    code="body_too_large",
                    headers=CLOSE,
                )
            num_free = MAX_BODIES * most - sum(self._num_bytes.values()) - len(part)
            if self._num_bytes.get(tenant, 0) + len(part) > max(num_free, 0):
                raise self._admission.full(
                    f"requests of {tenant!r} that are being read are too large together", "bodies_full"
                )
            self._add(tenant, len(part))
            body += part
            if not message.get("more_body", False):
                return True

    async def _check(self, tenant: str, body: bytes) -> LongBody | None:
        """Checks the body; returns it as Python if it was parsed."""
        if len(body) <= SMALL_BODY_BYTES:
            check_json(body)
            return None
        parsed = await self._threads.run(tenant, parse_long, body)
        return LongBody(parsed.pop(), partial(self._threads.run, tenant)) if parsed else None


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
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True
        await self._send(message)
