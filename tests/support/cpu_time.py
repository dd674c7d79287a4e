"""CPU time of a call, of which nothing is anybody else's."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def least_cpu_seconds(call: Callable[[], object], *, tries: int = 3) -> float:
    """CPU seconds of this thread in the fastest of some calls.

    Neither the garbage of earlier tests, whose collection may take a second, nor other threads of this process count.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        return min(_seconds(call) for _ in range(tries))
    finally:
        if collected:
            gc.enable()


def _seconds(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin
