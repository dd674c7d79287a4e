"""CPU limit: maximum processor time for reading one request, checked between pieces of work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvmosaic.errors import TooMuchWork

_of_thread = threading.local()


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Makes `check_cpu` raise in this thread once it has used this much CPU time in this block."""
    before = getattr(_of_thread, "limit", None)
    _of_thread.limit = (time.thread_time() + seconds, seconds)
    try:
        yield
    finally:
        _of_thread.limit = before


def check_cpu() -> None:
    """Raises if the limit is exceeded; call it every few hundredths of a second. Does nothing without a limit.

    Raises:
        TooMuchWork: this thread has exceeded its limit.
    """
    limit = getattr(_of_thread, "limit", None)
    if limit is not None and time.thread_time() > limit[0]:
        raise TooMuchWork(f"reading this took more than {limit[1]:g} s of processor time; send less at once")
