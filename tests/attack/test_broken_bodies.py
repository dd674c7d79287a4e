"""Bodies that stop being HTTP in the middle: one 400 at most, and no traceback in the log."""

from __future__ import annotations

import asyncio
import logging

import pytest
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvmosaic.server.process.listener import listen, listener_for
from kvmosaic.server.settings import ServerSettings

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def at_once(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without reading, as whoever has no key is answered."""
    await PlainTextResponse("no", 401)(scope, receive, send)


async def after_reading(scope: Scope, receive: Receive, send: Send) -> None:
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass
    await PlainTextResponse("read", 200)(scope, receive, send)


async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
    async def parts():
        for _ in range(20):
            yield b"part "
            await asyncio.sleep(0.02)

    await StreamingResponse(parts())(scope, receive, send)


async def talk(app, pieces: list[bytes]) -> bytes:
    settings = ServerSettings(port=0)
    listener, place = listener_for(app, settings), listen(settings)
    serving = asyncio.create_task(listener.serve(sockets=[place]))
    reader, writer = await asyncio.open_connection(*place.getsockname())
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.1)
    try:
        return await asyncio.wait_for(reader.read(), 120)
    finally:
        writer.close()
        listener.should_exit = True
        await serving


@pytest.mark.parametrize("app", [at_once, after_reading, streaming], ids=lambda app: app.__name__)
@pytest.mark.parametrize("pieces", [[HEAD + b"ZZZ\r\n"], [HEAD + b"3\r\nabc\r\n", b"ZZZ\r\n"]], ids=["one", "two"])
def test_body_that_stops_being_http_leaves_no_traceback(app, pieces, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        received = asyncio.run(talk(app, pieces))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR], caplog.text
    assert received.count(b"HTTP/1.1") <= 1 and b" 500 " not in received
    if app is after_reading:
        assert received.startswith(b"HTTP/1.1 400")
