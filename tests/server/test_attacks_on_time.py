"""Attacks on time: clients that wait, keep others waiting, or do not let the server go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from support.server import RunningServer, wait_until

from kvmosaic.server.admission import NUM_THREADS
from kvmosaic.server.process import listener
from kvmosaic.server.process.listener import listen, listener_for
from kvmosaic.server.settings import ServerSettings


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a socket option of Linux")
def test_client_that_never_reads_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "UNREAD_SECONDS", 1)
    with listen(ServerSettings(port=0)) as place, socket.create_connection(place.getsockname()):
        accepted, _ = place.accept()
        with accepted, pytest.raises(TimeoutError, match="Connection timed out"):
            accepted.sendall(bytes(2**26))


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost: ", b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET"])
def test_connection_that_waits_for_nothing_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """A first request that takes longer is answered all the same."""
    monkeypatch.setattr(listener, "IDLE_SECONDS", 0.2)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.5)
        await Response("here")(scope, receive, send)

    async def talk() -> bytes:
        settings = ServerSettings(port=0)
        listener, place = listener_for(answer, settings), listen(settings)
        serving = asyncio.create_task(listener.serve(sockets=[place]))
        reader, writer = await asyncio.open_connection(*place.getsockname())
        writer.write(sent)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := await asyncio.wait_for(reader.read(2**16), 20):
                received += part
        writer.close()
        listener.should_exit = True
        await serving
        return received

    begin = time.monotonic()
    assert asyncio.run(talk()).endswith(b"here" if b"x" in sent else b"")
    assert time.monotonic() - begin >= 0.2


def test_closing_server_tells_those_who_wait_for_a_thread() -> None:
    free = threading.Event()
    with RunningServer() as server, ThreadPoolExecutor(4) as clients:
        services = server.services
        busy = [services.threads.submit(f"busy {number}", free.wait, 120) for number in range(NUM_THREADS)]
        url, body = server.url + "/tokenize", {"prompt": "Where does the ferry go?"}
        replies = [clients.submit(httpx.post, url, json=body, timeout=30) for _ in range(3)]
        warm = {"documents": ["The ferry goes to Oak Island."]}
        replies.append(clients.submit(httpx.post, server.url + "/v1/documents:warm", json=warm, timeout=30))
        wait_until(lambda: len(services.threads.awaited) == 4)
        server.call(services.close)
        late = httpx.post(url, json=body, timeout=30)
        for reply in (*(reply.result() for reply in replies), late):
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "unavailable"
            assert "Retry-After" in reply.headers
        assert not any(task.done() for task in busy)
        free.set()


def test_busy_thread_is_noticed_when_the_server_ends() -> None:
    free = threading.Event()
    with RunningServer() as server, ThreadPoolExecutor(1) as client:
        assert not server.services.threads.is_working
        waiting = client.submit(server.call, server.services.threads.run, "one", free.wait, 20)
        wait_until(lambda: server.services.threads.is_working)
        free.set()
        assert waiting.result()
        wait_until(lambda: not server.services.threads.is_working)


def test_document_whose_warming_was_cut_short_is_not_called_cached() -> None:
    with RunningServer(max_num_batched_tokens=16) as server, ThreadPoolExecutor(1) as client:
        body = {"documents": ["The ferry goes to Oak Island. " * 300]}
        warming = client.submit(httpx.post, server.url + "/v1/documents:warm", json=body, timeout=30)
        wait_until(lambda: server.services.engine.num_running)
        server.call(server.services.close)
        reply = warming.result()  # of the only document, which failed
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
