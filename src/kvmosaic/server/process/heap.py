"""Heap trimming: memory that large requests have freed goes back to the operating system.

glibc keeps what is freed in the middle of its arenas, one arena per thread. A server that reads bodies of megabytes in
several threads holds hundreds of megabytes that way, and what it holds grows for hours. `malloc_trim` gives whole free
pages back, wherever they are. Other C libraries need none of this, and have no such function.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

TRIM_SECONDS = 30.0
MIN_GROWTH_BYTES = 32 * 2**20
"""Resident memory since the last time: trimming costs some milliseconds, and page faults afterwards."""


@asynccontextmanager
async def trimmed_heap(seconds: float = TRIM_SECONDS, min_growth_bytes: int = MIN_GROWTH_BYTES) -> AsyncIterator[None]:
    """Trims the heap every few seconds where resident memory has grown, for as long as the block runs."""
    if (trim := _malloc_trim()) is None or not resident_bytes():
        yield
        return
    task = asyncio.create_task(_trim_always(trim, seconds, min_growth_bytes), name="heap-trim")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def resident_bytes() -> int:
    """Resident memory of this process in bytes; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


async def _trim_always(trim: Callable[[int], int], seconds: float, min_growth_bytes: int) -> None:
    floor = resident_bytes()
    while True:
        await asyncio.sleep(seconds)
        if resident_bytes() >= floor + min_growth_bytes:
            await asyncio.to_thread(trim, 0)  # ctypes releases the interpreter's lock
            floor = resident_bytes()


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    found: Callable[[int], int] = trim
    return found
