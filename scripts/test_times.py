"""Records the processor times of tests in `tests/times.txt`, or checks that new tests are fast.

python scripts/test_times.py [PATH ...]    measures tests (all of them: an hour) and records their times
python scripts/test_times.py --check       measures tests that are not recorded; one that is slow must be marked
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.times import (
    ALL_CASES,
    LIMIT,
    ROOT,
    TESTS_ELSEWHERE,
    TIMES,
    Times,
    function_of,
    read_times,
    tests_in,
    write_times,
)

_MOST_DOUBTED = 8 * LIMIT
"""A test that takes longer is not slow by being the first to load something."""


class Taken(NamedTuple):
    """What a test takes."""

    seconds: float
    is_marked: bool
    """Whether it is marked."""
    is_slow: bool
    """Whether its mark says that it is slow, however long it takes."""


Found = dict[tuple[str, str], Taken]
"""By file and case."""


def measured(options: Sequence[str], tests: Iterable[str]) -> Found:
    """What tests take. Tests that seem slow are run again, in the opposite order: some are slow only once."""
    found = _run(options, tests)
    doubtful = [f"{file}::{case}" for (file, case), taken in found.items() if LIMIT < taken.seconds < _MOST_DOUBTED]
    again = _run(options, reversed(doubtful)) if doubtful else {}
    return {**found, **{key: min(taken, found[key]) for key, taken in again.items()}}


def _run(options: Sequence[str], tests: Iterable[str]) -> Found:
    with tempfile.TemporaryDirectory() as folder:
        result, names = Path(folder) / "times", Path(folder) / "tests"
        names.write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not real", "--record-times", str(result)]
        command += [*options, f"@{names}"]
        subprocess.run(command, cwd=ROOT, check=False)  # noqa: S603
        lines = result.read_text().splitlines() if result.exists() else []
    read = map(json.loads, lines)
    return {(each["file"], each["case"]): Taken(each["seconds"], each["is_marked"], each["is_slow"]) for each in read}


def merged(times: Times, found: Found) -> Times:
    """Recorded and new times: a number that hardly changed stays, so that few lines change."""
    cases: dict[tuple[str, str], dict[str, float]] = {}
    for (file, case), taken in found.items():
        at_least = LIMIT + 0.1 if taken.is_slow else 0.0
        cases.setdefault((file, function_of(case)), {})[case] = max(taken.seconds, at_least)
    result = {file: dict(entries) for file, entries in times.items() if (ROOT / file).exists()}
    for (file, function), entries in cases.items():
        recorded = result.setdefault(file, {})
        before = {case: recorded.pop(case) for case in list(recorded) if function_of(case) == function}
        if len(entries) > 1 and max(entries.values()) <= LIMIT:
            entries = {f"{function}{ALL_CASES}": sum(entries.values())}
        recorded.update({case: _steady(before.get(case), seconds) for case, seconds in entries.items()})
    return {file: known for file, entries in result.items() if (known := _known(file, entries))}


def _known(file: str, entries: dict[str, float]) -> dict[str, float]:
    names = tests_in(ROOT / file)
    return {case: seconds for case, seconds in entries.items() if _name(case) in names}


def _name(case: str) -> str:
    """Of its function or class."""
    return function_of(case).partition("::")[0]


def _steady(before: float | None, now: float) -> float:
    is_near = before is not None and abs(now - before) <= max(0.1, 0.3 * before)
    return before if before is not None and is_near and (before > LIMIT) == (now > LIMIT) else now


def unrecorded(times: Times) -> list[str]:
    """Functions and classes of tests that are not recorded."""
    paths = ((path, path.relative_to(ROOT).as_posix()) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return [
        f"{file}::{name}"
        for path, file in paths
        if not file.startswith(TESTS_ELSEWHERE)
        for name in sorted(tests_in(path) - set(map(_name, times.get(file, ()))))
    ]


def check() -> int:
    """Measures what is not recorded, and records it; 1 if a test is slow and not marked."""
    times = read_times()
    if not (new := unrecorded(times)):
        return 0
    print(f"{len(new)} tests are not in {TIMES.name} and are measured:", *new, sep="\n  ", flush=True)
    found = measured([], new)
    slow = [(key, taken) for key, taken in found.items() if taken.seconds > LIMIT and not taken.is_marked]
    for (file, case), taken in slow:
        print(f"{file}::{case} takes {taken.seconds:.1f} s of CPU, over {LIMIT}: make it faster, or mark it")
    if not os.environ.get("CI"):
        write_times(merged(times, {key: taken for key, taken in found.items() if (key, taken) not in slow}))
    return int(bool(slow))


def record(tests: Sequence[str]) -> int:
    """Measures tests and records their times."""
    found = measured(["-n", "2", "--dist", "worksteal"], tests or ["tests"])
    write_times(merged(read_times(), found))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="measure tests that are not recorded")
    parser.add_argument("tests", nargs="*")
    arguments = parser.parse_args()
    sys.exit(check() if arguments.check else record(arguments.tests))
