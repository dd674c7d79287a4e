"""CPU quota of a container: Linux control groups, version 2 and version 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MAX_BYTES = 65_536
_MAX_CORES = 65_536.0


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Seconds of CPU time that this process may use per second, by the tightest of the groups around it.

    A limit such as `--cpus 2` takes no core away: programs see all cores of the host, and when the time of a tenth of a
    second is used up, all of their threads are paused until the next one.

    Args:
        root: where `proc` and `sys` are.

    Returns:
        For example 2.0 or 0.5; None if there is no limit, or none can be read.
    """
    groups = root / "sys" / "fs" / "cgroup"
    quotas = [
        quota
        for line in _read(root / "proc" / "self" / "cgroup").splitlines()
        for folder in _folders(groups, line)
        if (quota := _quota(folder)) is not None
    ]
    return min(quotas, default=None)


def _folders(groups: Path, line: str) -> Iterator[Path]:
    """The folders of a group and of all groups around it: `4:cpu,cpuacct:/pod/container` or `0::/user`.

    Inside a container the path may be that of the host and not be there, but its beginning, the mounted group, is.
    """
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    if number == "0" and not controllers:
        tops = [groups, groups / "unified"]
    elif "cpu" in controllers.split(","):
        tops = [groups / controllers, groups / "cpu"]
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
    if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) < 16 for word in words):
        return None
    quota, period = (int(word) for word in words)
    return min(quota / period, _MAX_CORES) if quota and period else None


def _read(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(MAX_BYTES)
    except OSError:
        return ""
