"""Whatever hangs, SIGTERM ends the server in its time, and a second one at once."""

from __future__ import annotations

import signal
import socket
import time
from urllib.parse import urlsplit

import pytest
from support.server import ServeCommand

FAULT = """
import threading, time
from kvmosaic.server import launch
from kvmosaic.server.services import Services

async def hang_with_the_loop(*arguments):
    launch.logger.warning("hangs")
    while True:
        pass

async def hang_while_closing(services):
    threading.Event().wait()

launch.GRACE_SECONDS = launch.PUT_SECONDS = 0.0
launch.CLOSING_SECONDS = 1
{fault}
from kvmosaic.cli import main
main()
"""
FAULTS = {
    "loop": "launch._Launch._warm = hang_with_the_loop",
    "closing": "Services.close = hang_while_closing",
    "none": "",
}


class HangingServer(ServeCommand):
    """A server whose event loop hangs, from the start or from the end of draining on."""

    def __init__(self, fault: str, *arguments: str) -> None:
        super().__init__(*arguments)
        self._program = ("-c", FAULT.format(fault=FAULTS[fault]))


@pytest.mark.parametrize("fault", ["loop", "closing"])
def test_a_server_that_hangs_is_ended_after_its_grace_period(fault: str) -> None:
    with HangingServer(fault, "--drain-seconds", "1") as server:
        server.until("hangs" if fault == "loop" else "ready")
        server.stop()
        assert server.wait() == 1
        assert "killed: it did not stop within 2 s\n" in server.log


def test_a_second_signal_ends_a_server_that_hangs_at_once() -> None:
    with HangingServer("loop", "--drain-seconds", "1000") as server:
        server.until("hangs")
        server.stop()
        time.sleep(0.5)  # the system makes one of two that come at once
        server.stop()
        assert server.wait() == 128 + signal.SIGTERM


def port_of(server: ServeCommand) -> int:
    port = urlsplit(server.until_ready().url).port
    assert port is not None
    return port


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/documents:batch"])
def test_a_body_that_has_not_come_is_answered_when_the_server_ends(path: str) -> None:
    with HangingServer("none") as server, socket.create_connection(("127.0.0.1", port_of(server))) as client:
        head = "Host: localhost\r\nContent-Type: application/x-ndjson\r\nContent-Length: 1000"
        client.sendall(f'POST {path} HTTP/1.1\r\n{head}\r\n\r\n{{"text": "The ferry'.encode())
        time.sleep(0.5)
        server.stop()
        client.settimeout(60)
        with client.makefile("rb") as reply:
            told = reply.read().decode()
        assert told.startswith("HTTP/1.1 503") and "the server ended before the whole body had come" in told
        assert server.wait() == 0 and "Traceback" not in server.log
