"""Deadline: the remaining time of an operation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Deadline:
    """A moment on a monotonic clock."""

    def __init__(self, seconds: float = math.inf, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Ends `seconds` from now; never, by default."""
        self._clock = clock
        self._end = clock() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left; 0.0 when it has passed."""
        return max(0.0, self._end - self._clock())

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self._clock() >= self._end
