"""`kvmosaic serve` in a process of its own, for benchmarks, and documents of made-up words."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

SECONDS_TO_START = 180.0


class Served:
    """A server on a free port of loopback, from `with` until its end.

    with Served("reader", "--chunk-cache-size", "256MiB") as server:
        httpx.get(f"{server.url}/readyz")
    """

    def __init__(self, model: str, *options: str, threads: int = 1) -> None:
        self._command = [sys.executable, "-m", "kvmosaic", "serve", model, "--port", "0", *options]
        # threads that spin while they wait would take the cores from the measuring process
        self._environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        self._lines: list[str] = []
        self.url = ""

    def __enter__(self) -> Served:
        self._process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=self._environment)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        end = time.monotonic() + SECONDS_TO_START
        while not (ready := re.search(r"^ready +(http\S+)", "".join(self._lines), re.MULTILINE)):
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                raise RuntimeError("the server did not start:\n" + "".join(self._lines))
            time.sleep(0.05)
        self.url = ready[1]
        return self

    def cpu_seconds(self) -> float:
        """What all threads of the server have used of the processor so far; NaN where the system does not tell."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        if not tasks.exists():
            return float("nan")
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join(5)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)


def made_up_text(source: random.Random, num_words: int) -> str:
    """Sentences of random words, so that no two documents are alike."""
    words = ["".join(source.choices("abdeiklmnorstu", k=source.randint(3, 8))) for _ in range(num_words)]
    return " ".join(words).capitalize() + "."
