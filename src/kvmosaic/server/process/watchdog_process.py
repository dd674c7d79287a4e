"""Watchdog process: kills a server that does not stop after a signal. Run as a script; imports no other module.

    python watchdog_process.py PID SIGNALS SECONDS

Standard input is a pipe that the server holds. A byte on it says "stopping, and alive": SECONDS from the first one, and
at least BEAT_SECONDS from each, are granted. Its end says that the server has ended. SIGNALS is a socket to which the
interpreter writes the number of every signal at once, whatever holds its lock. The server reads it too; this process
only peeks.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time

STDIN = 0
BEAT_SECONDS = 15.0


def watch(server: int, signals: socket.socket, seconds: float) -> None:
    """Returns when the server has ended, or was killed."""
    poll = select.poll()
    poll.register(STDIN, select.POLLIN)
    poll.register(signals, select.POLLIN)
    end: float | None = None
    seen = b""
    while True:
        left = None if end is None else max(end - time.monotonic(), 0.0)
        if left == 0.0:
            return stop(
                server, f"it did not stop within {seconds:g} s and said nothing: something holds the interpreter"
            )
        ready = {number for number, _ in poll.poll(None if left is None else left * 1e3)}
        if STDIN in ready:
            said = os.read(STDIN, 64)
            if not said:
                return None
            end = time.monotonic() + seconds if end is None else max(end, time.monotonic() + BEAT_SECONDS)
        if signals.fileno() in ready:
            with contextlib.suppress(BlockingIOError):  # the server has read it, and will report it
                seen = signals.recv(64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            told = sum(number in (signal.SIGTERM, signal.SIGINT) for number in seen)
            if told > 1:
                return stop(server, "two signals came")
            if told:
                end = time.monotonic() + seconds if end is None else end
            time.sleep(0.05)  # a signal that is never read stays ready


def stop(server: int, why: str) -> None:
    """Kills the server's process."""
    if os.getppid() == server:
        sys.stderr.write(f"killed: {why}\n")
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # signalled together with the server, it stays to watch the server
    watch(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), float(sys.argv[3]))
