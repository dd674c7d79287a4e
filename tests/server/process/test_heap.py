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

ARENAS = """
import asyncio, ctypes, re, tempfile, threading
from kvmosaic.server.process.listener import trimmed_heap

libc = ctypes.CDLL(None)
libc.fopen.restype = libc.malloc.restype = ctypes.c_void_p
libc.fclose.argtypes = (ctypes.c_void_p,)
libc.malloc_info.argtypes = (ctypes.c_int, ctypes.c_void_p)

def num_arenas():
    with tempfile.NamedTemporaryFile("r") as file:
        stream = libc.fopen(file.name.encode(), b"w")
        libc.malloc_info(0, stream)
        libc.fclose(stream)
        return len(re.findall("<heap nr=", file.read()))

@trimmed_heap()
async def main():
    all_here = threading.Barrier(9)
    threads = [threading.Thread(target=lambda: (libc.malloc(1000), all_here.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    all_here.wait()
    assert num_arenas() <= 2, num_arenas()

asyncio.run(main())
"""

ONLY_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this C library has no malloc_trim")


@pytest.mark.slow
@ONLY_GLIBC
@pytest.mark.parametrize("program", [BURST, ARENAS], ids=["memory that a burst has freed goes back", "two arenas"])
def test_the_heap_of_a_server_stays_small(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
