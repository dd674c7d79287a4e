"""Limits of the container: how much CPU time and memory its control groups allow this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MAX_QUOTA_FILE_BYTES = 65_536
_MAX_CORES = 65_536.0
_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")
"""Version 2, where "max" is no limit; and version 1, where a number of 19 digits is none."""


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Seconds of CPU time that this process may use per second, by the tightest of the groups around it.

    A limit such as `--cpus 2` takes no core away: programs see all cores of the host, and when the time of a tenth of a
    second is used up, all of their threads are paused until the next one.

    Args:
        root: where `proc` and `sys` are.

    Returns:
        For example 2.0 or 0.5; None if there is no limit, or none can be read.
    """
    return min((quota for folder in _folders(root, "cpu") if (quota := _quota(folder)) is not None), default=None)


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process may use, by the tightest of the groups around it; None without a limit."""
    limits = (_read(folder / name).strip() for folder in _folders(root, "memory") for name in _MEMORY_FILES)
    return min((int(limit) for limit in limits if _is_count(limit, digits=18)), default=None)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process can still have without swapping; None where the system does not say.

    What the machine has available, or what the container's limit leaves of it beside this process.
    """
    available = _kib(_read(root / "proc" / "meminfo"), "MemAvailable")
    limit, used = memory_limit(root), _kib(_read(root / "proc" / "self" / "status"), "VmRSS")
    left = [max(limit - used, 0)] if limit is not None and used is not None else []
    return min([*left, *([available] if available is not None else [])], default=None)


def _kib(text: str, name: str) -> int | None:
    """Bytes in a line such as `MemAvailable:   16000000 kB`."""
    found = re.search(rf"^{name}:\s+([0-9]{{1,15}}) kB$", text, re.MULTILINE)
    return int(found[1]) * 1_024 if found else None


def _folders(root: Path, controller: str) -> Iterator[Path]:
    groups = root / "sys" / "fs" / "cgroup"
    for line in _read(root / "proc" / "self" / "cgroup").splitlines():
        yield from _folders_of(groups, line, controller)


def _folders_of(groups: Path, line: str, controller: str) -> Iterator[Path]:
    """The folders of a group and of all groups around it: `4:cpu,cpuacct:/pod/container` or `0::/user`.

    Inside a container the path may be that of the host and not be there, but its beginning, the mounted group, is.
    """
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if number == "0" and not controllers:
        tops = [groups, groups / "unified"]
    elif controller in controllers.split(","):
        tops = [groups / controllers, groups / controller]
    else:
        return
    inner = PurePosixPath(path.lstrip("/"))
    if ".." not in inner.parts:
        yield from (top / part for top in tops for part in (inner, *inner.parents))


def _quota(folder: Path) -> float | None:
    """Version 2: `200000 100000` or `max 100000` in one file; version 1: two files, and -1 for no limit."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
    if len(words) != 2 or not all(_is_count(word, digits=15) for word in words):
        return None
    quota, period = (int(word) for word in words)
    return min(quota / period, _MAX_CORES) if quota and period else None


def _is_count(word: str, *, digits: int) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= digits


def _read(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(MAX_QUOTA_FILE_BYTES)
    except OSError:
        return ""
