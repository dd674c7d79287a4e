"""Watchdog: SIGTERM ends the server in time, even if a thread never releases the interpreter's lock.

A handler written in Python runs only when the interpreter gets to it: an endless regular expression, or a library that
keeps the lock, would block it forever. So a small separate process watches the same signals and counts the seconds; see
`watchdog_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

MAX_BEATS = 90
"""Maximum seconds by which a stopping server may extend its deadline; writing to the tiers takes less."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
RELOAD_SIGNAL = getattr(signal, "SIGHUP", None)
"""None where the system has no such signal."""

logger = logging.getLogger("kvmosaic.server")


class Watchdog:
    """Calls back on the event loop on a signal to stop or to reload, and kills the process if it then takes too long.

    with Watchdog(seconds=40) as watchdog:
        watchdog.listen(stop, reload)     # inside of a running event loop
    """

    def __init__(self, seconds: float) -> None:
        """`seconds` count from the first signal to the end of the process."""
        self._seconds = seconds
        self._ours, self._interpreters = socket.socketpair()
        self._life: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Watchdog:
        self._ours.setblocking(False)
        self._interpreters.setblocking(False)
        self._handlers = {number: signal.signal(number, _to_the_socket) for number in STOP_SIGNALS}
        if RELOAD_SIGNAL is not None and signal.getsignal(RELOAD_SIGNAL) is not signal.SIG_IGN:  # as with nohup
            self._handlers[RELOAD_SIGNAL] = signal.signal(RELOAD_SIGNAL, _to_the_socket)
        self._before = signal.set_wakeup_fd(self._interpreters.fileno(), warn_on_full_buffer=False)
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        if self._life is not None:
            os.close(self._life)  # the process ends with it
        if self._process is not None:
            self._process.wait()
        self._ours.close()
        self._interpreters.close()

    def listen(self, stop: Callable[[int], None], reload: Callable[[], None]) -> None:
        """Calls `stop` on the running event loop with the number of every stop signal, and `reload` at SIGHUP."""
        asyncio.get_running_loop().add_reader(self._ours, self._read, stop, reload)

    def ignore(self) -> None:
        """Reverts `listen`."""
        asyncio.get_running_loop().remove_reader(self._ours)

    def _read(self, stop: Callable[[int], None], reload: Callable[[], None]) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in self._ours.recv(64):
                if number == RELOAD_SIGNAL:
                    reload()
                if number in STOP_SIGNALS:
                    self._beat(int(self._seconds) + MAX_BEATS)
                    stop(number)

    def _beat(self, left: int) -> None:
        """Signals now and every second that the server is stopping and its event loop is alive."""
        if self._life is not None and left:
            with contextlib.suppress(OSError):  # the process has ended
                os.write(self._life, b".")
            asyncio.get_running_loop().call_later(1.0, self._beat, left - 1)

    def _start(self) -> None:
        end, self._life = os.pipe()
        script = str(Path(__file__).with_name("watchdog_process.py"))
        command = (sys.executable, "-I", "-S", script, str(os.getpid()), str(self._ours.fileno()), str(self._seconds))
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own script, by its path
                command, stdin=end, stdout=subprocess.DEVNULL, pass_fds=(self._ours.fileno(),), start_new_session=True
            )
        except OSError as error:
            logger.warning("no watchdog: %s; a stuck request can keep this server from stopping", error)
            os.close(self._life)
            self._life = None
        finally:
            os.close(end)


def _to_the_socket(number: int, frame: object) -> None:
    """Does nothing: the interpreter has already written the signal's number to the socket."""
