"""Do the fast tests find what all tests find?

    python scripts/mutants.py [--part TEXT] [--jobs 2]

Plants the faults of `tests/mutants.toml` one at a time in a copy of `src`, and runs the fast tests of their part. A
fault that these miss is given to the slow ones: what they find, the fast ones must find, too. Results are kept in
`runs/mutants.jsonl`, and the next call goes on where this one was; delete that file to begin again. Ends with 1 if the
fast tests miss a fault that the slow ones find. Takes an hour on two cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).parents[1]
FAULTS = ROOT / "tests/mutants.toml"
RESULTS = ROOT / "runs/mutants.jsonl"
FAST = ("-m", "not slow and not alone and not real")
SLOW = ("-m", "(slow or hypothesis) and not alone and not real", "--hypothesis-profile=full")
_HANGS_SECONDS = 900
"""A run that takes so long has found the fault: it hangs."""

Fault = dict[str, Any]


def faults() -> list[Fault]:
    """The list, each with a name that changes with its text."""
    found: list[Fault] = tomllib.loads(FAULTS.read_text())["fault"]
    for fault in found:
        text = json.dumps([fault["file"], fault["old"], fault["new"], fault["tests"]])
        fault["name"] = f"{fault['file']} {hashlib.sha256(text.encode()).hexdigest()[:6]}"
    return found


def planted(source: str, fault: Fault) -> str:
    """The text of a file with the fault."""
    assert source.count(fault["old"]) == 1, f"{fault['old']!r} is {source.count(fault['old'])} times in {fault['file']}"
    return source.replace(fault["old"], fault["new"])


def is_found(tree: Path, tests: Iterable[str], options: Iterable[str]) -> bool:
    """Whether a test fails; raises if the tests cannot be run."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--show-capture=no", *options]
    environment = {**os.environ, "PYTHONPATH": str(tree), "CI": "1"}
    try:
        run = subprocess.run(  # noqa: S603
            [*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=_HANGS_SECONDS
        )
    except subprocess.TimeoutExpired:
        return True
    if run.returncode in (0, 5):  # 5: no such test
        return False
    if run.returncode == 1 or "rror" in run.stdout:  # the fault may keep tests from being collected
        return True
    raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout[-2000:]}{run.stderr[-2000:]}")


def verdict(tree: Path, fault: Fault) -> str:
    """By which tests a fault is found: "fast", "slow" or "none"."""
    path = tree / "kvmosaic" / fault["file"]
    source = path.read_text()
    path.write_text(planted(source, fault))
    try:
        if is_found(tree, fault["tests"], FAST):
            return "fast"
        return "slow" if is_found(tree, fault["tests"], SLOW) else "none"
    finally:
        path.write_text(source)


def main() -> int:
    """Plants all faults that have no result yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="", help="only faults in files whose path has this text")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    known = {line["name"]: line["found_by"] for line in map(json.loads, lines)}
    wanted = [fault for fault in faults() if options.part in fault["file"]]
    console, trees = Console(), SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as folder, Progress(console=console) as progress:
        for number in range(options.jobs):
            tree = Path(folder) / str(number)
            shutil.copytree(ROOT / "src", tree, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            trees.put(tree)
        task = progress.add_task("faults", total=len(wanted), completed=sum(each["name"] in known for each in wanted))

        def plant(fault: Fault) -> None:
            tree = trees.get()
            try:
                known[fault["name"]] = found_by = verdict(tree, fault)
            finally:
                trees.put(tree)
            with RESULTS.open("a") as file:
                file.write(json.dumps({"name": fault["name"], "found_by": found_by}) + "\n")
            console.print(f"{found_by:5} {fault['name']}: {fault['old']!r:.90}", markup=False, highlight=False)
            progress.advance(task)

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(plant, [fault for fault in wanted if fault["name"] not in known]))
    counts = Counter(known[fault["name"]] for fault in wanted)
    console.print(f"found by fast tests {counts['fast']}, by slow ones only {counts['slow']}, by none {counts['none']}")
    return int(counts["slow"] > 0)


if __name__ == "__main__":
    sys.exit(main())
