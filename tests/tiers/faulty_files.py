"""Files that fail, or whose process is killed, at a chosen call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from kvmosaic.tiers.disk.files import RealFiles

CALLS = (
    "open",
    "close",
    "read",
    "write",
    "sync",
    "flush",
    "lock",
    "facts",
    "facts_of",
    "names",
    "rename",
    "remove",
    "make_folder",
    "set_time",
)


class FaultyFiles:
    """Passes calls on, and counts them. `fault` is asked about each: None, or what happens instead of it.

    The disk is never waited for: what a killed process has written is there anyway.
    """

    def __init__(self, fault: Callable[[int, str], str | int | None] = lambda number, name: None) -> None:
        self.fault = fault
        self.num_calls = 0
        self._real = RealFiles()

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)
        real = (lambda fd: None) if name == "sync" else getattr(self._real, name)

        def call(*arguments: Any, **named: Any) -> Any:
            self.num_calls += 1
            match self.fault(self.num_calls, name):
                case "killed before":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "killed in the middle":
                    if name == "write":
                        real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                case "killed after":
                    real(*arguments, **named)
                    os.kill(os.getpid(), signal.SIGKILL)
                case "short":
                    return real(arguments[0], arguments[1][: max(1, len(arguments[1]) // 3)])
                case int() as number if number > 0:
                    if name == "close":  # the operating system gives the fd back, whatever it says
                        real(*arguments, **named)
                    raise OSError(number, os.strerror(number))
                case int() as number:  # it happened, and the answer was lost
                    result = real(*arguments, **named)
                    if name == "open":
                        os.close(result)
                    raise OSError(-number, os.strerror(-number))
            return real(*arguments, **named)

        return call
