"""Whatever a request does, SIGTERM ends the server in its time."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
from support.server import ServeCommand

from kvmosaic.server.process.watchdog import Watchdog

OLD_FAULT = r"""
import re, sys
from kvmosaic.api import json_limits
from kvmosaic.server import launch
# what kvmosaic 0.1 had: one text of escaped quotes takes quadratic time, and keeps the interpreter's lock all the while
json_limits._PARTS = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[][{}NI]|-?[0-9][0-9.eE+-]*+', re.DOTALL)
launch.GRACE_SECONDS = 0.0
launch.CLOSING_SECONDS = 1
from kvmosaic.cli import main
main()
"""
BODY = b'"' + b'\\"' * 400_000


class StuckServer(ServeCommand):
    """A server with a fault of old, which can be kept busy for hours by one body."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments)
        self._program = ("-c", OLD_FAULT)


def stick(server: ServeCommand) -> None:
    """Sends the body, and returns when the server no longer answers."""

    def send() -> None:
        with pytest.raises(httpx.HTTPError):
            httpx.post(server.url + "/tokenize", content=BODY, headers={"Content-Type": "application/json"}, timeout=60)

    threading.Thread(target=send, daemon=True).start()
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            httpx.get(server.url + "/livez", timeout=2)
        except httpx.TimeoutException:
            return
    pytest.fail("the server is not stuck: this test no longer tries what it says")


@pytest.mark.parametrize("count", [1, 2])
def test_a_server_whose_interpreter_is_held_is_killed(count: int) -> None:
    """After its grace period, or at once when it is told a second time."""
    drain = "1" if count == 1 else "1000"
    with StuckServer("--drain-seconds", drain) as server:
        server.until_ready()
        stick(server)
        for _ in range(count):
            server.stop(signal.SIGTERM)
            time.sleep(0.5)  # the system makes one of two that come at once
        assert server.wait(120) == -signal.SIGKILL
        why = "it did not stop within 2 s and said nothing" if count == 1 else "two signals came"
        assert f"killed: {why}" in server.log


def test_a_server_that_stops_takes_its_watchdog_along() -> None:
    with ServeCommand("--drain-seconds", "1") as server:
        server.until_ready()
        (watchdog,) = children_of(server.process.pid)
        server.stop(signal.SIGTERM)
        assert server.wait() == 0
        assert "killed" not in server.log
    until_gone(watchdog)


def test_a_watchdog_does_not_outlive_a_server_that_was_killed() -> None:
    with ServeCommand() as server:
        server.until_ready()
        (watchdog,) = children_of(server.process.pid)
        server.stop(signal.SIGKILL)
        server.wait()
    until_gone(watchdog)


def test_a_server_says_that_it_lives_for_longer_than_it_may_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one that drains for minutes would be killed while it writes to its tiers."""
    beats: list[int] = []
    monkeypatch.setattr(Watchdog, "_beat", lambda self, left: beats.append(left))

    async def be_told() -> None:
        told = asyncio.Event()
        with Watchdog(seconds=1_000) as watchdog:
            watchdog.listen(lambda number: told.set(), lambda: None)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(told.wait(), 60)
            watchdog.ignore()

    asyncio.run(be_told())
    assert beats and beats[0] >= 1_000 + 60


def children_of(process: int) -> list[int]:
    children = Path(f"/proc/{process}/task/{process}/children")
    return [int(child) for child in children.read_text().split()]


def until_gone(process: int) -> None:
    end = time.monotonic() + 60
    while is_there(process):
        assert time.monotonic() < end
        time.sleep(0.05)


def is_there(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
