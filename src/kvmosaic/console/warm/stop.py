"""Graceful stop by Ctrl-C: the first requests a stop, the second forces it."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """A stop was requested."""


class Stop:
    """Whether a stop was requested. Signals only set a flag, so that no operation is cut in the middle.

    A second signal raises KeyboardInterrupt wherever the program is.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Raises Interrupted if a stop was requested."""
        if self.is_asked:
            raise Interrupted

    def __enter__(self) -> Stop:
        self._before = {each: signal.signal(each, self._ask) for each in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
