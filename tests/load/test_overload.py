"""Ten times more requests than the server can take."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from support.server import ServeCommand

pytestmark = pytest.mark.alone  # it measures time
RUNNING, WAITING = 4, 4
CLIENTS = 10 * (RUNNING + WAITING)
SECONDS = 10
LIMIT_SECONDS = 0.1
STALL_SECONDS = 0.03


class Metronome:
    """Notices when the machine does not let even this process run; such moments say nothing about the server."""

    def __init__(self) -> None:
        self.stalls: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Metronome:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def was_steady(self, begin: float, end: float) -> bool:
        return not any(start < end and begin < stop for start, stop in self.stalls)

    def _tick(self) -> None:
        last = time.perf_counter()
        while not self._ended.wait(0.005):
            now = time.perf_counter()
            if now - last > STALL_SECONDS:
                self.stalls.append((last, now))
            last = now


def test_overload_is_refused_politely_and_the_server_stays_alive() -> None:
    settings = ("--max-num-seqs", str(RUNNING), "--max-queue", str(WAITING))
    with ServeCommand(*settings) as command, httpx.Client(timeout=10) as probe, Metronome() as metronome:
        command.until_ready()
        program = [sys.executable, str(Path(__file__).with_name("flood.py")), command.url, str(CLIENTS), str(SECONDS)]
        probes = []
        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as flood:
            while flood.poll() is None:
                begin = time.perf_counter()
                assert probe.get(command.url + "/livez").status_code == 200
                probes.append((begin, time.perf_counter()))
                time.sleep(0.05)
            assert flood.stdout is not None
            seen = json.loads(flood.stdout.read())
        steady = [end - begin for begin, end in probes if metronome.was_steady(begin, end)]
        print(seen, f"/livez: median {sorted(steady)[len(steady) // 2]:.4f} s, slowest {max(steady):.4f} s")
        print(f"{len(probes)} probes, {len(steady)} while the machine was steady")
        assert set(seen) <= {"200", "429", "503"}
        assert seen["200"] >= RUNNING
        assert seen["429"] > seen["200"]
        assert len(steady) > 20
        assert max(steady) < LIMIT_SECONDS
