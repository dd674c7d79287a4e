"""The clock of lifetimes: unix seconds that no change of the system's clock moves."""

from __future__ import annotations

import time
from collections.abc import Callable


def lifetime_clock() -> Callable[[], float]:
    """A clock that begins at the system's time, and then only counts.

    Whoever sets the system's clock an hour forward does not delete every document that has a lifetime. Time that a
    laptop sleeps counts where the system can tell (Linux).
    """
    begin = time.time() - _counted()
    return lambda: begin + _counted()


def _counted() -> float:
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
