"""Attacks on time: clients that wait, keep others waiting, or do not let the server go."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.server import RunningServer, wait_until

from kvmosaic.server import listening
from kvmosaic.server.listening import listen
from kvmosaic.server.services import NUM_THREADS
from kvmosaic.server.settings import ServerSettings


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="a socket option of Linux")
def test_client_that_never_reads_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "UNREAD_SECONDS", 1)
    with listen(ServerSettings(port=0)) as place, socket.create_connection(place.getsockname()):
        accepted, _ = place.accept()
        with accepted, pytest.raises(TimeoutError, match="Connection timed out"):
            accepted.sendall(bytes(2**26))


def test_closing_server_tells_those_who_wait_for_a_thread() -> None:
    free = threading.Event()
    with RunningServer() as server, ThreadPoolExecutor(4) as clients:
        services = server.services
        for _ in range(NUM_THREADS):
            services.threads.submit(free.wait, 20)
        url, body = server.url + "/tokenize", {"prompt": "Where does the ferry go?"}
        replies = [clients.submit(httpx.post, url, json=body, timeout=30) for _ in range(3)]
        warm = {"documents": ["The ferry goes to Oak Island."]}
        replies.append(clients.submit(httpx.post, server.url + "/v1/documents:warm", json=warm, timeout=30))
        wait_until(lambda: len(services._awaited) == 4)
        begin = time.monotonic()
        server.call(services.close)
        late = httpx.post(url, json=body)
        for reply in (*(reply.result() for reply in replies), late):
            assert reply.status_code == 503 and reply.json()["error"]["code"] == "unavailable"
            assert "Retry-After" in reply.headers
        assert time.monotonic() - begin < 5
        free.set()


def test_busy_thread_is_noticed_when_the_server_ends() -> None:
    free = threading.Event()
    with RunningServer() as server, ThreadPoolExecutor(1) as client:
        assert not server.services.is_working
        waiting = client.submit(server.call, server.services.in_thread, free.wait, 20)
        wait_until(lambda: server.services.is_working)
        free.set()
        assert waiting.result()
        wait_until(lambda: not server.services.is_working)
