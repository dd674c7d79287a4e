"""CPU limit: how much processor time reading one request may take, looked at between pieces of work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kvmosaic.errors import TooMuchWork

_of_thread = threading.local()


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Has `check_cpu` raise in this thread as soon as it has used so much CPU time in this block."""
    before = getattr(_of_thread, "limit", None)
    _of_thread.limit = (time.thread_time() + seconds, seconds)
    try:
        yield
    finally:
        _of_thread.limit = before


def check_cpu() -> None:
    """Called between pieces of work of some hundredths of a second; does nothing where there is no limit.

    Raises:
        TooMuchWork: this thread has used what it may.
    """
    limit = getattr(_of_thread, "limit", None)
    if limit is not None and time.thread_time() > limit[0]:
        raise TooMuchWork(f"reading this took more than {limit[1]:g} s of processor time; send less at once")
