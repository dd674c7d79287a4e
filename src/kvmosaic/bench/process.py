"""Memory and CPU time of a process, as reported by the system."""

from __future__ import annotations

import os
import re
from pathlib import Path


def resident_bytes(process_id: int, *, peak: bool = False) -> int | None:
    """Memory that a process holds now, or held at most since `forget_peak`; None where the system does not tell."""
    try:
        text = Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return None
    found = re.search(rf"^{'VmHWM' if peak else 'VmRSS'}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def forget_peak(process_id: int) -> None:
    """Resets the peak to the current value; does nothing where the system does not support it."""
    try:
        Path(f"/proc/{process_id}/clear_refs").write_text("5")
    except OSError:
        return


def cpu_seconds(process_id: int) -> float | None:
    """CPU time of all threads of a process so far; None where the system does not tell."""
    if process_id == os.getpid():
        return sum(os.times()[:2])
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
