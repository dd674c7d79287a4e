"""Server-sent events: a reply as a stream, cancelled when its reader disconnects, with keep-alive comments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import anyio
from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from kvmosaic.web.errors import ApiError, as_api_error, request_id_of

KEEP_ALIVE_SECONDS = 10.0
DONE = "data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: BaseModel, name: str | None = None) -> str:
    """Returns one event; omits fields of `data` that were not set."""
    body = f"data: {data.model_dump_json(exclude_unset=True, by_alias=True)}\n\n"
    return f"event: {name}\n{body}" if name else body


def error_event(error: ApiError, request_id: str) -> str:
    """Returns the last event of a stream that failed, in OpenAI's shape."""
    return f"data: {json.dumps(error.body)}\n\n"


@dataclass(frozen=True, slots=True)
class StreamForm:
    """What a stream sends besides its events."""

    waiting: str = ": waiting\n\n"
    """Sent after ten seconds without an event."""
    error: Callable[[ApiError, str], str] = error_event
    """The last event for an error and the id of the request."""


OPENAI_FORM = StreamForm()


class EventStream(StreamingResponse):
    """A stream of events. However it ends, started or not, it closes its source, which aborts the request."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Future[str],
        source: AsyncGenerator[str, None],
        request_id: str,
        form: StreamForm = OPENAI_FORM,
    ) -> None:
        """Creates a stream from the pending first event, the source of the others, and their request."""
        self._first = first
        self._source = source
        self._events = _kept_alive(first, source, request_id, form)
        super().__init__(self._events, headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await self._events.aclose()
            await _end(self._first, self._source)


async def open_stream(
    request: Request, events: AsyncGenerator[str, None], form: StreamForm = OPENAI_FORM
) -> EventStream:
    """Begins a stream when its first event is ready, so that an earlier failure gets its own status.

    After ten seconds without an event the stream begins anyway, with what keeps the connection open. A later failure
    is the last event.

    Raises:
        Whatever `events` raises before its first event.
    """
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait({first}, timeout=KEEP_ALIVE_SECONDS)
        if first.done():
            first.result()
    except BaseException:
        await _end(first, events)
        raise
    return EventStream(first, events, request_id_of(request), form)


async def _kept_alive(
    pending: asyncio.Future[str], events: AsyncGenerator[str, None], request_id: str, form: StreamForm
) -> AsyncGenerator[str, None]:
    try:
        while True:
            await asyncio.wait({pending}, timeout=KEEP_ALIVE_SECONDS)
            if not pending.done():
                yield form.waiting
                continue
            try:
                text = pending.result()
            except StopAsyncIteration:
                return
            except Exception as error:
                yield form.error(as_api_error(error, request_id), request_id)
                return
            yield text
            pending = asyncio.ensure_future(anext(events))
    finally:
        await _end(pending, events)


async def _end(pending: asyncio.Future[str], events: AsyncGenerator[str, None]) -> None:
    """Closes a generator that a task may still await."""
    with anyio.CancelScope(shield=True):
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
        await events.aclose()
