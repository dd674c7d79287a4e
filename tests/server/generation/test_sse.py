from __future__ import annotations

import asyncio
import json

import pytest
from starlette.requests import Request

from kvmosaic.errors import InvalidPrompt
from kvmosaic.web import sse
from kvmosaic.web.errors import ApiError


def request():
    return Request({"type": "http", "headers": [], "state": {"request_id": "r1"}})


class Source:
    """Events that end as they are told, and know whether they were closed."""

    def __init__(self, *items):
        self.items = items
        self.is_closed = False
        self.gate = asyncio.Event()

    async def events(self):
        try:
            for item in self.items:
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    await self.gate.wait()
                else:
                    yield item
        finally:
            self.is_closed = True


async def read(stream):
    return [text async for text in stream.body_iterator]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_events_pass_in_order_and_headers_keep_proxies_from_holding_them_back():
    async def scene():
        source = Source("a", "b", "c")
        stream = await sse.open_stream(request(), source.events())
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert (stream.headers["cache-control"], stream.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert await read(stream) == ["a", "b", "c"] and source.is_closed

    run(scene())


def test_what_fails_before_the_first_event_is_raised():
    async def scene():
        source = Source(InvalidPrompt("too odd"))
        with pytest.raises(InvalidPrompt):
            await sse.open_stream(request(), source.events())
        assert source.is_closed

    run(scene())


@pytest.mark.parametrize("error", [ApiError(503, "gone", code="unavailable"), ValueError("secret")])
def test_what_fails_later_is_the_last_event_and_tells_nothing_of_the_inside(error):
    async def scene():
        source = Source("a", error)
        *before, last = await read(await sse.open_stream(request(), source.events()))
        assert before == ["a"] and source.is_closed
        told = json.loads(last.removeprefix("data: "))["error"]
        assert set(told) == {"message", "type", "param", "code"} and "secret" not in last
        assert told["message"] == ("gone" if isinstance(error, ApiError) else "internal error (request r1)")

    run(scene())


def test_silence_is_filled_with_comments(monkeypatch):
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.01)

    async def scene():
        source = Source(None, "a", None, "b")
        seen = []
        async for text in (await sse.open_stream(request(), source.events())).body_iterator:
            seen.append(text)
            if seen.count(": waiting\n\n") == 3:
                source.gate.set()
        assert [text for text in seen if text != ": waiting\n\n"] == ["a", "b"] and seen[0] == ": waiting\n\n"

    run(scene())


@pytest.mark.parametrize("items", [("a", None), (None,)], ids=["in the middle", "before the first event"])
def test_cancelling_the_reader_closes_the_source_at_once(items, monkeypatch):
    monkeypatch.setattr(sse, "KEEP_ALIVE_SECONDS", 0.05)

    async def scene():
        source = Source(*items)

        async def reply():
            async def send(message):
                pass

            async def receive():
                await asyncio.Event().wait()

            stream = await sse.open_stream(request(), source.events())
            await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)

        task = asyncio.ensure_future(reply())
        await asyncio.sleep(0.1)
        assert not source.is_closed
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert source.is_closed

    run(scene())


def test_a_slow_reader_that_goes_away_closes_the_source():
    async def scene():
        source = Source("a", "b", "c")
        gone = asyncio.Event()

        async def send(message):
            if message.get("body") == b"b":
                gone.set()
                await asyncio.Event().wait()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        stream = await sse.open_stream(request(), source.events())
        await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        assert source.is_closed

    run(scene())


def test_a_stream_that_never_begins_closes_its_source():
    async def scene():
        source = Source("a", "b")

        async def send(message):
            raise OSError("the connection is gone")

        async def receive():
            await asyncio.Event().wait()

        stream = await sse.open_stream(request(), source.events())
        with pytest.raises(OSError, match="gone"):
            await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        assert source.is_closed

    run(scene())
