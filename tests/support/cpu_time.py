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


def waited_seconds(call: Callable[[], object], process_id: int) -> float:
    """Seconds that a call waits for a process: by the clock or by what the process computes meanwhile, if that is less.

    A machine that is busy with something else makes nobody wait for the process.
    """
    clock = (~process_id << 3) | 2  # Linux: all threads of a process, in nanoseconds
    begin, cpu = time.monotonic(), time.clock_gettime(clock)
    call()
    return min(time.monotonic() - begin, time.clock_gettime(clock) - cpu)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin
