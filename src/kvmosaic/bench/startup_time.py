"""Startup time of the command: its help, and the first answer of the bundled model."""

from __future__ import annotations

import subprocess
import sys
import time

_COMMANDS = {
    "help": ("--help",),
    "answer": (
        *("run", "reader", "Be brief. ## The ferry goes to Oak Island. ## Where does it go?"),
        *("--chunk-separator", "##", "--max-tokens", "1"),
    ),
}
_MAX_SECONDS = 300


def starting_seconds(name: str, tries: int = 3) -> float:
    """The fastest of several starts, in seconds; "help", or "answer" for one token of the bundled model."""
    command = [sys.executable, "-m", "kvmosaic", *_COMMANDS[name]]
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, timeout=_MAX_SECONDS)  # noqa: S603
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
