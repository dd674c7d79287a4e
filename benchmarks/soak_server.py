"""The server under soak: a process with keys, a small cache and small tiers, and what it costs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

HONEST = ("north", "south", "west")
HOSTILE = ("pirate", "vandal")
QUIET = "quiet"
"""Asks for the known answers before the load, so that no other tenant finds its chunks."""
QUOTAS = {**dict.fromkeys(HONEST, "1536KiB"), **dict.fromkeys(HOSTILE, "576KiB")}
CHUNK_CACHE = "8MiB"
DISK_QUOTA = "4MiB"
OPTIONS = f"""
    --dtype float32 --chunk-cache-size {CHUNK_CACHE} --request-cache-size 32MiB --swap-space 16MiB
    --chunk-loading always --chunk-pending 16MiB --chunk-staged 16MiB
    --document-ttl 120 --max-documents 100 --max-documents-bytes 2000000
    --drain-seconds 10 --uvicorn-log-level warning
""".split()
"""What may fill is small, so that it is full early and memory is flat from then on."""
SECONDS_TO_START = 300.0
MAX_LOGGED = 20 * 2**20
_TICKS = os.sysconf("SC_CLK_TCK")
_PARENT_DIED = 1


def key_of(tenant: str) -> str:
    return f"{tenant}-key-of-the-soak"


def headers_of(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(tenant)}"}


class SoakServer:
    """`kvmosaic serve` from `with` until its end; its log goes to a file that does not grow for ever.

    It has a session of its own, so Ctrl+C ends the soak first, and goes when the soak is killed.
    """

    def __init__(self, folder: Path, redis_url: str | None) -> None:
        keys = folder / "keys.yaml"
        lines = [f"- {{key: {key_of(name)}, tenant: {name}, quota: {quota}}}\n" for name, quota in QUOTAS.items()] + [
            f"- {{key: {key_of(name)}, tenant: {name}, admin: true}}\n" for name in ("admin", QUIET)
        ]
        keys.touch(mode=0o600)
        keys.write_text("".join(lines))
        self.disk = folder / "disk"
        self._log = folder / "server.log"
        tiers = [f"disk:{self.disk.resolve()}?quota={DISK_QUOTA}"]
        tiers += [redis_url] if redis_url else []
        arguments = [part for tier in tiers for part in ("--chunk-tier", tier)]
        self._command = [sys.executable, "-m", "kvmosaic", "serve", "reader", "--port", "0", "--keys-file", str(keys)]
        self._command += [*OPTIONS, *arguments]
        # threads that spin while they wait would take the cores from the measuring process
        self._environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self._last: deque[str] = deque(maxlen=300)
        self.num_tracebacks = 0
        self.url = ""

    def __enter__(self) -> SoakServer:
        self.process = subprocess.Popen(
            self._command,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=self._environment,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        end = time.monotonic() + SECONDS_TO_START
        while not self.url:
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise RuntimeError("the server did not start:\n" + self.log)
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5)

    @property
    def log(self) -> str:
        """The end of it."""
        return "".join(self._last)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, seconds: float) -> int | None:
        """The exit code after SIGTERM; None if there is none in time."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def figures(self) -> dict[str, float]:
        """Memory in MB, descriptors, threads, CPU seconds; what the process holds now."""
        return {**process_figures(self.process.pid), "log_bytes": self._log.stat().st_size}

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self._log.open("a") as file:
            for line in self.process.stderr:
                self._last.append(line)
                self.num_tracebacks += line.startswith("Traceback")
                if file.tell() < MAX_LOGGED:
                    file.write(line)
                    file.flush()
                if ready := re.match(r"ready +(http\S+)", line):
                    self.url = ready[1]


def process_figures(process_id: int) -> dict[str, float]:
    """What a process holds: `anonymous` is what the system cannot take back, `pss` has its share of what is shared."""
    place = Path(f"/proc/{process_id}")
    status = dict(re.findall(r"^(\w+):\s+(\d+)", (place / "status").read_text(), re.MULTILINE))
    rollup = dict(re.findall(r"^(\w+):\s+(\d+)", (place / "smaps_rollup").read_text(), re.MULTILINE))
    times = (place / "stat").read_text().rpartition(")")[2].split()
    return {
        "rss_mb": int(status["VmRSS"]) / 1024,
        "anonymous_mb": int(status["RssAnon"]) / 1024,
        "pss_mb": int(rollup["Pss"]) / 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(list((place / "fd").iterdir())),
        "cpu_seconds": sum(int(part) for part in times[11:15]) / _TICKS,
    }


_SAMPLE = re.compile(r"^([\w:]+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_SUMMED = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "kvmosaic:documents": "documents",
    "kvmosaic:document_bytes": "document_bytes",
    "kvmosaic:chunk_entries": "chunks",
    "kvmosaic:chunk_evictions_total": "chunk_evictions",
    "kvmosaic:chunk_loads_total": "chunk_loads",
    "kvmosaic:chunk_misses_total": "chunk_misses",
    "kvmosaic:preemptions_total": "preemptions",
    "kvmosaic:tier_pending_bytes": "tier_pending_bytes",
    "kvmosaic:tier_stores_total": "tier_stores",
}
_BY_TIER = (
    "bytes",
    "failures_total",
    "quarantined_total",
    "evictions_total",
    "hits_total",
    "breaker_openings_total",
    "up",
)


def metric_figures(text: str) -> dict[str, Any]:
    """What a soak keeps of a scrape."""
    figures: dict[str, Any] = {"blocks": {}, "tiers": {}}
    for name, written, value in _SAMPLE.findall(text):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', written))
        if name in _SUMMED:
            figures[_SUMMED[name]] = figures.get(_SUMMED[name], 0.0) + float(value)
        elif name == "kvmosaic:pool_blocks":
            figures["blocks"][f"{labels['pool']} {labels['state']}"] = float(value)
        elif name.startswith("kvmosaic:tier_") and (kept := name.removeprefix("kvmosaic:tier_")) in _BY_TIER:
            figures["tiers"].setdefault(labels["tier"], {})[kept.removesuffix("_total")] = float(value)
    return figures


def end_left_over(place: Path) -> None:
    """Ends the Redis of a soak that was killed: the one that wrote its id here and works here."""
    with contextlib.suppress(OSError, ValueError):
        process_id = int((place / "pid").read_text())
        if Path(f"/proc/{process_id}/cwd").readlink() == place:
            os.kill(process_id, signal.SIGKILL)


def _end_with_parent() -> None:
    """In the child: SIGTERM when the soak dies, so that a killed one leaves no orphaned server."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGTERM)
