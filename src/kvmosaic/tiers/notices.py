"""Rate-limited log warnings: a repeated one is logged once, and then once a minute."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Hashable

EVERY_SECONDS = 60.0
_MAX_SUBJECTS = 256


class Notices:
    """Warnings about subjects, each logged at most once a minute, with the number suppressed since.

    It remembers 256 subjects and drops the oldest above that. Thread-safe.
    """

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[Hashable, tuple[float, int]] = {}
        """Per subject: time of the last log line, and occurrences since."""

    def warn(self, subject: Hashable, text: str) -> bool:
        """Logs a warning unless its subject had one within a minute; returns whether it was logged."""
        if (left_out := self.count(subject)) is not None:
            self._log.warning("%s%s", text, left_out)
        return left_out is not None

    def count(self, subject: Hashable) -> str | None:
        """Counts an occurrence: None within a minute of the last one that was not, else those left out, in words."""
        with self._lock:
            now = self._clock()
            last, since = self._said.get(subject, (-math.inf, 0))
            is_due = now - last >= EVERY_SECONDS
            self._note(subject, (now, 0) if is_due else (last, since + 1))
        if not is_due:
            return None
        return f" ({since:,} times more in the last {now - last:,.0f} s)" if since else ""

    def warn_once(self, subject: Hashable, text: str) -> None:
        """Logs a warning about a subject that had none yet."""
        with self._lock:
            is_new = subject not in self._said
            if is_new:
                self._note(subject, (self._clock(), 0))
        if is_new:
            self._log.warning("%s", text)

    def _note(self, subject: Hashable, said: tuple[float, int]) -> None:
        self._said[subject] = said
        if len(self._said) > _MAX_SUBJECTS:
            del self._said[next(iter(self._said))]
