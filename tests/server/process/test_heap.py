"""Heap trimming: what a burst leaves behind goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvmosaic.server.process.listener import _malloc_trim, resident_bytes

BURST = """
import asyncio, ctypes
from kvmosaic.server.process.listener import resident_bytes, trimmed_heap

async def main():
    # 200 MB in pieces below glibc's threshold for mappings of their own, and one that keeps the arena's top in place
    pieces = [ctypes.create_string_buffer(100_000) for _ in range(2_000)]
    kept, full = pieces[-1], resident_bytes()
    async with trimmed_heap(seconds=0.05, min_growth_bytes=0):
        del pieces
        async with asyncio.timeout(30):
            while resident_bytes() > full - 100 * 2**20:
                await asyncio.sleep(0.05)
        assert any(task.get_name() == "heap-trim" for task in asyncio.all_tasks())
    assert not any(task.get_name() == "heap-trim" for task in asyncio.all_tasks())
    return kept

asyncio.run(main())
"""


@pytest.mark.skipif(_malloc_trim() is None or not resident_bytes(), reason="this C library has no malloc_trim")
def test_memory_that_a_burst_has_freed_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
