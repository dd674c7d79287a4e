"""Ten times more requests than the server can take."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
from support.cpu_time import waited_seconds
from support.server import ServeCommand
from support.target import slowness

RUNNING, WAITING = 4, 4
CLIENTS = 10 * (RUNNING + WAITING)
SECONDS = 10
LIMIT_SECONDS = 0.1


def test_overload_is_refused_politely_and_the_server_stays_alive() -> None:
    settings = ("--max-num-seqs", str(RUNNING), "--max-queue", str(WAITING))
    with ServeCommand(*settings) as command, httpx.Client(timeout=60) as probe:
        command.until_ready()
        program = [sys.executable, str(Path(__file__).with_name("flood.py")), command.url, str(CLIENTS), str(SECONDS)]
        waits = []

        def look() -> None:
            assert probe.get(command.url + "/livez").status_code == 200

        with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as flood:
            while flood.poll() is None:
                waits.append(waited_seconds(look, command.process.pid))
                time.sleep(0.05)
            assert flood.stdout is not None
            seen = json.loads(flood.stdout.read())
        print(seen, f"/livez: {len(waits)} probes, median {statistics.median(waits):.4f} s, slowest {max(waits):.4f} s")
        assert set(seen) <= {"200", "429", "503"}
        assert seen["200"] >= RUNNING
        assert seen["429"] > seen["200"]
        assert len(waits) > 20
        assert max(waits) < LIMIT_SECONDS * slowness()
