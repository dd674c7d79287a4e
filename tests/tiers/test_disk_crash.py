"""Processes that are killed at any moment lose at most what was under way, and nobody ever reads a wrong entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("crashing.py")
NUM_KILLS = int(os.environ.get("KILLS", "600"))
"""Of processes in all; a long run has 2,000."""


@pytest.fixture
def folder(quick_folder: Path) -> Path:
    """A killed process leaves in memory what it would leave on a disk."""
    return quick_folder / "tier"


def run(*arguments: object) -> dict[str, int]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300 + NUM_KILLS, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Error" not in result.stderr, result.stderr[-3000:]
    done: dict[str, int] = json.loads(result.stdout)
    return done


@pytest.mark.parametrize("seed", [1, 2])
def test_a_process_that_is_killed_loses_at_most_what_was_under_way(folder: Path, seed: int) -> None:
    """Half of them are killed at a random moment, half before, within or after a random call to the system."""
    done = run("kill", folder, NUM_KILLS // 2, seed)
    assert done["kills"] == NUM_KILLS // 2
    assert done["cut off"] > 100
    assert done["drafts left over"] > 10
    assert min(done[kind] for kind in ("put", "get", "touch", "delete", "quarantine", "scan")) > 100


def test_processes_that_share_a_folder_never_read_a_wrong_entry(folder: Path) -> None:
    done = run("share", folder, 4, 1)
    assert done["kills"] > 5
    assert done["entries at the end"] > 0
    # three processes, and drafts and files of up to 9000 bytes that some of them have just written or placed
    assert done["most bytes"] <= 40_000 * (1 + 3 / 16) + 3 * 9_000
