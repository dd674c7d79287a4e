"""`kvmosaic serve` as a person types it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Served(NamedTuple):
    """A server that is ready, and what it has said until then."""

    url: str
    lines: list[str]


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """`kvmosaic serve` with these arguments, on a free port, until it is ready."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    command = (sys.executable, "-u", "-m", "kvmosaic", "serve", *arguments, "--port", str(port))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if line.startswith("ready"):
                    break
            assert lines and lines[-1].startswith("ready"), "\n".join(lines)
            yield Served(f"http://127.0.0.1:{port}", lines)
        finally:
            process.send_signal(signal.SIGTERM)
            said, _ = process.communicate(timeout=60)
    assert process.returncode == 0, said
