"""Which test files does CI run of the slow suite?

    python scripts/slow_part.py [--most SECONDS]

Prints files of `tests` whose slow tests take so many processor seconds together (as `tests/times.txt` has them). For at
most half of the time they are of folders that the commits of the last six hours touched, then a quarter of the others,
which changes with the commit. `make test-slow` runs all.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.times import ROOT, TESTS_ELSEWHERE, slow_seconds

_PARTS = 4
_SECONDS = 6 * 3600
"""A commit of this time before the last one is recent."""


def git(*arguments: str) -> str:
    """What git prints."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout  # noqa: S603


def touched_folders() -> set[str]:
    """Names of folders with recent changes in `src/kvmosaic` and `tests`, and of test files beside these folders."""
    since = int(git("log", "-1", "--format=%ct")) - _SECONDS
    found = set()
    for path in git("log", f"--since=@{since}", "--name-only", "--format=").splitlines():
        match Path(path).parts:
            case ["src", "kvmosaic", name] if name.endswith(".py"):
                found.add(f"test_{name}")
            case ["src", "kvmosaic", "lab", name, *_] | ["src", "kvmosaic", name, *_] | ["tests", name, *_]:
                found.add("integrations" if name == "vllm" else name)
    return found


def chosen(commit: str, touched: set[str], most: float) -> list[str]:
    """Files of at most so many seconds."""

    def turn(file: str) -> int:
        return (int(hashlib.sha256(file.encode()).hexdigest(), 16) + int(commit[:8], 16)) % _PARTS

    paths = (path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))
    files = sorted(file for file in paths if not file.startswith(TESTS_ELSEWHERE))
    by_turn = sorted(files, key=turn)
    recent = _fitting([file for file in by_turn if set(Path(file).parts[1:]) & touched], most / 2)
    others = [file for file in by_turn if turn(file) == 0 and file not in recent]
    return sorted(recent + _fitting(others, most - sum(map(slow_seconds, recent))))


def _fitting(files: list[str], most: float) -> list[str]:
    found: list[str] = []
    for file in files:
        if (seconds := slow_seconds(file)) <= most:
            found.append(file)
            most -= seconds
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=float, default=700.0, metavar="SECONDS")
    print(*chosen(git("rev-parse", "HEAD").strip(), touched_folders(), parser.parse_args().most), sep="\n")
