"""The server under attack: a process of its own with three keys, and what an attack costs it and others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx

from kvmosaic.lab.bench.measurement import forget_peak, resident_bytes
from support.cpu_time import waited_seconds
from support.server import ServeCommand

KEYS = {"hostile": "hostile-key", "honest": "honest-key", "admin": "admin-key"}
_TICKS = os.sysconf("SC_CLK_TCK")
QUESTION = {"messages": [{"role": "user", "content": "Who keeps a cat?"}], "max_tokens": 4, "temperature": 0}
PROBE_PAUSE = 0.02
_REFERENCE_SECONDS = 0.02
_NUM_MEASURED = 15


@dataclass
class Costs:
    """What others saw while an attack ran, in seconds; see `waited_seconds`."""

    memory_mb: float = 0.0
    chats: list[float] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)


class Target:
    """A server with one hostile tenant and one honest one."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        keys = "\n".join(
            f"- {{key: {key}, tenant: {name}, admin: {'true' if name == 'admin' else 'false'}}}"
            for name, key in KEYS.items()
        )
        file = folder / "keys.yaml"
        file.write_text(keys + "\n")
        self._command = ServeCommand("--keys-file", str(file), *arguments, OMP_NUM_THREADS="1")

    def __enter__(self) -> Target:
        self._command.__enter__().until_ready()
        self.url = self._command.url
        for _ in range(3):  # whatever is computed once for all
            self.ask()
        self.usual_chat = min(self.timed(self.ask) for _ in range(3))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._command.__exit__(kind, error, trace)

    @property
    def is_alive(self) -> bool:
        return self._command.process.poll() is None

    @property
    def cpu_seconds(self) -> float:
        """CPU time of the server and all its threads, and of its processes that have ended."""
        fields = Path(f"/proc/{self._command.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(int(part) for part in fields[11:15]) / _TICKS

    def memory_mb(self, *, peak: bool = False) -> float:
        num_bytes = resident_bytes(self._command.process.pid, peak=peak)
        assert num_bytes is not None
        return num_bytes / 2**20

    def ask(self) -> None:
        """The honest tenant's question; any reply but its answer is a failure."""
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=QUESTION, headers=headers_of("honest"), timeout=300)
        assert reply.status_code == 200, reply.text

    def probe(self) -> None:
        assert httpx.get(f"{self.url}/livez", timeout=300).status_code == 200

    @contextmanager
    def observed(self) -> Iterator[Costs]:
        """Asks and probes all the time, and measures what the server uses beyond the honest tenant's share."""
        forget_peak(self._command.process.pid)
        memory = self.memory_mb()
        costs, done, failures = Costs(), threading.Event(), []

        def watch(what: str, pause: float) -> None:
            try:
                while not done.is_set():
                    function, seen = (self.ask, costs.chats) if what == "chat" else (self.probe, costs.probes)
                    seen.append(self.timed(function))
                    done.wait(pause)
            except BaseException as failure:
                failures.append(failure)

        watchers = [
            threading.Thread(target=watch, args=args, daemon=True) for args in (("chat", 0.2), ("probe", PROBE_PAUSE))
        ]
        for watcher in watchers:
            watcher.start()
        try:
            yield costs
        finally:
            done.set()
            for watcher in watchers:
                watcher.join(300)
        if failures:
            raise failures[0]
        costs.memory_mb = self.memory_mb(peak=True) - memory

    def timed(self, function: Callable[[], object]) -> float:
        """Seconds that a call waits for the server."""
        return waited_seconds(function, self._command.process.pid)


def slowness() -> float:
    """How many times as long as on a free core of a server of 2024 the same work takes here and now, from 1 to 4."""
    begin = time.monotonic()
    for _ in range(_NUM_MEASURED):
        sum(number * number % 7 for number in range(400_000))
    return min(max((time.monotonic() - begin) / _NUM_MEASURED / _REFERENCE_SECONDS, 1.0), 4.0)


def headers_of(sender: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[sender]}"} if sender in KEYS else {}
