"""Processor times of tests, recorded in `tests/times.txt` by `scripts/test_times.py`, and which tests are slow.

A test of more than `LIMIT` seconds is marked `slow`, unless it is marked `representative`. Where a function has slow
cases only, its cheapest one stays. Seconds are those of one core of a common server; they are counted with all
processes that a test starts, and without what several tests share (session and module fixtures).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

LIMIT = 0.5
"""Seconds of a test that runs before every commit."""
MOST_OF_A_CASE = 3.0
"""Seconds that the cheapest case of a slow function may take to stay."""
ROOT = Path(__file__).parents[2]
TIMES = ROOT / "tests/times.txt"

ALL_CASES = "[*]"

TESTS_ELSEWHERE = ("tests/real/", "tests/integrations/vllm/")
"""Folders with suites of their own."""

Times = dict[str, dict[str, float]]
"""Seconds by file and case. A function whose cases are all fast is one entry, the sum of `test_x[*]`."""


def read_times(path: Path = TIMES) -> Times:
    found: Times = {}
    file = ""
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(" "):
            seconds, _, case = line.strip().partition(" ")
            found[file][case] = float(seconds)
        elif not line.startswith("#"):
            file = line
            found[file] = {}
    return found


def write_times(times: Times, path: Path = TIMES) -> None:
    lines = [f"# Processor seconds of tests, written by scripts/test_times.py; over {LIMIT} a test is slow"]
    for file, entries in sorted(times.items()):
        lines += [file, *(f" {seconds:.1f} {case}" for case, seconds in sorted(entries.items()))]
    path.write_text("\n".join(lines) + "\n")


def function_of(case: str) -> str:
    """A case without its parameters."""
    return case.partition("[")[0]


def tests_in(path: Path) -> set[str]:
    """The test functions and classes of a file."""
    return set(re.findall(r"^(?:(?:async )?def|class) (test\w*|Test\w*)", path.read_text(), re.MULTILINE))


@cache
def recorded_times() -> Times:
    return read_times()


@cache
def slow_cases(file: str) -> frozenset[str]:
    by_function: dict[str, dict[str, float]] = {}
    for case, seconds in recorded_times().get(file, {}).items():
        by_function.setdefault(function_of(case), {})[case] = seconds
    return frozenset(case for cases in by_function.values() for case in _slow(cases))


def slow_seconds(file: str) -> float:
    """Of the slow tests of a file."""
    times = recorded_times().get(file, {})
    return sum(times[case] for case in slow_cases(file))


def fast_seconds() -> float:
    """Of all recorded tests that are not slow."""
    times = recorded_times()
    return sum(times[file][case] for file in times for case in times[file].keys() - slow_cases(file))


def _slow(cases: dict[str, float]) -> Iterator[str]:
    """The slow cases of a function."""
    cheapest = min(cases, key=lambda case: (cases[case], case))
    stays = len(cases) > 1 and cases[cheapest] <= MOST_OF_A_CASE
    for case, seconds in cases.items():
        if seconds > LIMIT and not case.endswith(ALL_CASES) and not (stays and case == cheapest):
            yield case


class SlowTests:
    """Marks slow tests, and leaves files unread that have none to run."""

    @pytest.hookimpl
    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        if "not slow" not in config.option.markexpr or not collection_path.is_relative_to(TIMES.parent):
            return None
        file = collection_path.relative_to(ROOT).as_posix()
        slow = slow_cases(file)
        if not slow or slow != recorded_times()[file].keys():
            return None
        return (
            True if tests_in(collection_path) <= {case.partition("::")[0] for case in map(function_of, slow)} else None
        )

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            file, _, case = item.nodeid.partition("::")
            if case in slow_cases(file) and item.get_closest_marker("representative") is None:
                item.add_marker(pytest.mark.slow(recorded=True))


class Recorder:
    """Appends what every test took to a file, as lines of JSON; `shared` are the seconds of what it shares."""

    def __init__(self, path: Path, *, is_worker: bool) -> None:
        self._path = None if is_worker else path  # the controller gets the reports of all workers
        self._factor = 1.0
        self._begin = self._shared = 0.0
        self._clock = 0.0
        self._depth = 0

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        self._factor = 1.0 / min(_calibration_seconds() for _ in range(3))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._begin, self._shared, self._clock = _tree_seconds(), 0.0, time.monotonic()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        if fixturedef.scope == "function" or self._depth:
            return (yield)
        self._depth += 1
        begin = _tree_seconds()
        try:
            return (yield)
        finally:
            self._shared += _tree_seconds() - begin
            self._depth -= 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Iterator[None]:
        if call.when == "teardown":
            seconds = max(0.0, _tree_seconds() - self._begin - self._shared)
            taken = {"seconds": seconds * self._factor, "shared": self._shared * self._factor}
            taken["clock"] = time.monotonic() - self._clock
            taken["is_marked"] = any(map(item.get_closest_marker, ("slow", "representative")))
            taken["is_slow"] = any(not marker.kwargs for marker in item.iter_markers("slow"))
            item.user_properties.append(("taken", taken))
        return (yield)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        taken = dict(report.user_properties).get("taken")
        if isinstance(taken, dict) and self._path is not None:
            name, _, case = report.nodeid.partition("::")
            with self._path.open("a") as file:
                file.write(json.dumps({"file": name, "case": case, **taken}) + "\n")


def _calibration_seconds() -> float:
    """Processor seconds of some work: 1.0 on the machine whose seconds are recorded."""
    import torch  # not by the process that only distributes tests

    begin = time.thread_time()
    found = {f"key {number}": hashlib.sha256(str(number).encode()).hexdigest() for number in range(120_000)}
    sorted(json.loads(json.dumps(found)).values())
    square = torch.ones(64, 64)
    for _ in range(6_000):
        square = torch.tanh(square @ square)
    return time.thread_time() - begin


def _tree_seconds() -> float:
    """Processor seconds of this process and of all that it started, the ended ones too."""
    parents: dict[int, int] = {}
    seconds: dict[int, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_bytes().rpartition(b") ")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)] = int(fields[1])
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    mine, children = os.getpid(), os.times()
    total = time.process_time() + children.children_user + children.children_system
    for process in seconds:
        ancestor = process
        while ancestor not in (0, mine):
            ancestor = parents.get(ancestor, 0)
        if ancestor == mine != process:
            total += seconds[process]
    return total


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-times", type=Path, metavar="FILE", help="append the processor seconds of every test")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(SlowTests())
    if path := config.option.record_times:
        config.pluginmanager.register(Recorder(path, is_worker=hasattr(config, "workerinput")))
