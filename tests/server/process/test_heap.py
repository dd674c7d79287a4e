"""Heap trimming: what a burst leaves behind goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BURST = """
import asyncio, ctypes, os
from kvmosaic.server.process.listener import trimmed_heap

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

async def main():
    # 200 MB in pieces below glibc's threshold for mappings of their own, and one that keeps the arena's top in place
    pieces = [ctypes.create_string_buffer(100_000) for _ in range(2_000)]
    kept, full = pieces[-1], resident_bytes()
    async with trimmed_heap(seconds=0.05):
        del pieces
        async with asyncio.timeout(30):
            while resident_bytes() > full - 100 * 2**20:
                await asyncio.sleep(0.05)
        assert any(task.get_name() == "heap-trim" for task in asyncio.all_tasks())
    assert not any(task.get_name() == "heap-trim" for task in asyncio.all_tasks())
    return kept

asyncio.run(main())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library has no malloc_trim")
def test_memory_that_a_burst_has_freed_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
