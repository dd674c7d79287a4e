"""`make soak`, for some seconds: it finds nothing wrong, goes on where it was, and would notice what is wrong."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import httpx
import pytest
from support.server import wait_until

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
LIVELY = (
    "--livez-seconds",
    "60",
    "--sample",
    "2",
    "--honest-pause",
    "0.2",
    "--hostile-pause",
    "1",
    "--event-seconds",
    "2",
)


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The modules of the soak, imported as the script does it."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        names = ("soak_seen", "soak_server", "soak_known", "soak_honest", "soak_verdict", "soak_report")
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(SCRIPTS))


@contextmanager
def started(folder: Path, hours: float) -> Iterator[subprocess.Popen[str]]:
    """A soak, ended by the block's end at the latest."""
    command = [sys.executable, str(SCRIPTS / "soak.py"), "--hours", str(hours), *LIVELY]
    command += ["--folder", str(folder / "soak"), "--results", str(folder / "results")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            yield running
        finally:
            if running.poll() is None:
                running.terminate()
                running.communicate(timeout=200)


def samples(folder: Path) -> list[dict[str, Any]]:
    path = folder / "soak" / "samples.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["kind"] == "sample"]


def test_short_soak_finds_nothing_wrong_and_goes_on_where_it_was(tmp_path: Path) -> None:
    with started(tmp_path, hours=1) as first:
        wait_until(lambda: len(samples(tmp_path)) >= 4 or first.poll() is not None, 300)
        first.send_signal(signal.SIGTERM)
        told, _ = first.communicate(timeout=200)
    assert first.returncode == 0, told
    report = json.loads((tmp_path / "results" / "soak.json").read_text())
    assert report["ends"][0]["how"] == "after SIGTERM" and len(report["parts"]) == 1

    with started(tmp_path, hours=report["hours"] + 14 / 3600) as second:
        told, _ = second.communicate(timeout=300)
    assert second.returncode == 0, told
    report = json.loads((tmp_path / "results" / "soak.json").read_text())
    assert report["passed"] and [end["how"] for end in report["ends"]] == ["after SIGTERM", "in time"]
    assert {start["part"] for start in report["parts"]} == {1, 2}
    assert all(start["commit"] and start["processor"] and start["known"] for start in report["parts"])
    counts = report["counts"]
    assert counts["right"] > 20 and "wrong" not in counts
    assert any(name.startswith("event: ") for name in counts)
    assert any(name.startswith("hostile: ") for name in counts)
    assert report["latencies"]["livez"]["times"] and report["latencies"]["ttft"]["p99"]
    assert {"rss_mb", "pss_mb", "descriptors", "threads", "cpu_seconds", "blocks", "tiers"} <= set(report["last"])
    written = (tmp_path / "results" / "soak.md").read_text()
    assert "**PASS, but too short to judge growth**" in written and "never: a wrong answer" in written
    assert (tmp_path / "results" / "soak.png").read_bytes().startswith(b"\x89PNG")


class Answers(httpx.AsyncBaseTransport):
    """A server that says what it is told to."""

    def __init__(self, status: int, **body: Any) -> None:
        self.reply = (status, body)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        status, body = self.reply
        return httpx.Response(status, json=body, request=request)


def asked(scripts: dict[str, ModuleType], folder: Path, status: int, **body: Any) -> tuple[Any, list[dict[str, Any]]]:
    """What an honest client makes of a reply, and the faults that are on disk then."""
    known, honest, seen = scripts["soak_known"], scripts["soak_honest"], scripts["soak_seen"].Seen(folder, 1)
    question = known.moved_question(0, "Tolbury")
    world = honest.World("http://soak", known.Known({question: " Tolbury"}), seen, 1.0)
    client = honest.HonestClient(world, "north", "north-0", Random(1))
    client._http = httpx.AsyncClient(base_url="http://soak", transport=Answers(status, **body))

    async def ask() -> None:
        try:
            client.choose.random = lambda: 1.0  # /v1/chat/completions
            await client._asked(question, None)
        except honest.Refused:
            pass

    asyncio.run(ask())
    return seen, scripts["soak_seen"].read_lines(folder / "faults.jsonl")


def said(answer: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": answer}}]}


def test_wrong_answer_is_noticed(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    seen, faults = asked(scripts, tmp_path, 200, **said(" Halport"))
    assert seen.totals["wrong"] == 1 and seen.totals["right"] == 0
    assert [(fault["kind"], fault["right"], fault["answer"]) for fault in faults] == [
        ("a wrong answer", " Tolbury", " Halport")
    ]
    sample = {"kind": "sample", "part": 1, "elapsed": 1.0, **seen.taken()}
    checks = scripts["soak_verdict"].checks([sample], [], faults, 1.0)
    assert "never: a wrong answer" in [check.name for check in checks if not check.holds]


def test_right_answer_is_no_fault(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    seen, faults = asked(scripts, tmp_path, 200, **said(" Tolbury"))
    assert seen.totals["right"] == 1 and not faults


@pytest.mark.parametrize(
    ("status", "code", "is_fault"),
    [
        (500, "internal_error", True),
        (503, "engine_asleep", True),  # nobody put it to sleep
        (503, "engine_failing", True),
        (404, "document_not_found", True),
        (429, "tenant_queue_full", False),
    ],
)
def test_refusals_without_a_reason_are_noticed(
    scripts: dict[str, ModuleType], tmp_path: Path, status: int, code: str, is_fault: bool
) -> None:
    seen, faults = asked(scripts, tmp_path, status, error={"message": "x", "type": "x", "param": None, "code": code})
    assert seen.totals[f"refused {status} {code}"] == 1
    assert bool(faults) is is_fault


def series(hours: float, slope: float, *, noise: float = 3.0, peaks: float = 0.0) -> list[tuple[float, float]]:
    """A sample every 30 s that starts at 400, rises by so much in an hour, and jumps now and then."""
    choose = Random(3)
    return [
        (at, 400 + slope * at / 3600 + choose.gauss(0, noise) + (peaks if choose.random() < 0.2 else 0.0))
        for at in range(0, int(hours * 3600), 30)
    ]


@pytest.mark.parametrize(
    ("points", "is_too_fast"),
    [
        (series(8, 0.0), False),
        (series(8, 0.0, noise=15.0), False),
        (series(8, 0.0, peaks=200.0), False),
        (series(8, 3.0), False),
        (series(8, 20.0), True),
        (series(8, 20.0, peaks=200.0), True),
        (series(2, 60.0), True),
        (series(0.1, 1000.0), False),  # too short to tell from warming up
        ([(at, 400 + 100 * (1 - 2 ** (-at / 900))) for at in range(0, 28_800, 30)], False),  # warms up
    ],
)
def test_growth_is_told_from_noise_and_from_warming_up(
    scripts: dict[str, ModuleType], points: list[tuple[float, float]], is_too_fast: bool
) -> None:
    verdict = scripts["soak_verdict"]
    growth = verdict.growth_of(1, points, verdict.BOUNDS[0])
    assert growth.is_too_fast is is_too_fast, growth


def test_latencies_of_many_samples_are_joined(scripts: dict[str, ModuleType]) -> None:
    latencies = scripts["soak_seen"].Latencies
    one, other = latencies(), latencies()
    for number in range(990):
        one.add(0.01 + number * 1e-6)
    for _ in range(10):
        other.add(3.0)
    one.merge(latencies(json.loads(json.dumps(other.counts))))
    assert one.at(0.5) == pytest.approx(0.0105, rel=0.06)
    assert one.at(0.99) == pytest.approx(0.011, rel=0.06) and one.at(0.995) == pytest.approx(3.0, rel=0.06)


def test_half_a_line_of_a_killed_soak_is_passed_over(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    scripts["soak_seen"].append(path, {"kind": "sample", "part": 1})
    path.write_text(path.read_text() + '{"kind": "sam')
    scripts["soak_seen"].append(path, {"kind": "start", "part": 2})
    read = scripts["soak_seen"].read_lines(path)
    assert read == [{"kind": "sample", "part": 1}, {"kind": "start", "part": 2}]


def test_server_that_dies_is_noticed(tmp_path: Path) -> None:
    with started(tmp_path, hours=1) as running:
        wait_until(lambda: len(samples(tmp_path)) >= 1 or running.poll() is not None, 300)
        (server,) = [child for child in children(running.pid) if b"\0serve\0" in command_of(child)]
        os.kill(server, signal.SIGKILL)
        told, _ = running.communicate(timeout=100)
    assert running.returncode == 1 and "died with -9" in " ".join(told.split()), told


def children(process_id: int) -> list[int]:
    place = Path(f"/proc/{process_id}/task")
    return [int(child) for task in place.iterdir() for child in (task / "children").read_text().split()]


def command_of(process_id: int) -> bytes:
    return Path(f"/proc/{process_id}/cmdline").read_bytes()
