"""Clock for document TTLs: unix seconds, unaffected by changes of the system clock."""

from __future__ import annotations

import time
from collections.abc import Callable


def lifetime_clock() -> Callable[[], float]:
    """Returns a clock that starts at the system's time, and then counts monotonically.

    Setting the system clock forward does not expire documents. Time that a laptop sleeps counts where the system can
    tell (Linux).
    """
    begin = time.time() - _counted()
    return lambda: begin + _counted()


def _counted() -> float:
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
