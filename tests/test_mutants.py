"""The faults of `make mutants` can be planted: their places have not changed."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_fault_has_its_place_and_tests() -> None:
    faults = tomllib.loads((ROOT / "tests/mutants.toml").read_text())["fault"]
    assert len(faults) >= 60
    moved = [
        (fault["file"], fault["old"])
        for fault in faults
        if (ROOT / "src/kvmosaic" / fault["file"]).read_text().count(fault["old"]) != 1
    ]
    assert not moved, "give these their new text in tests/mutants.toml"
    assert all((ROOT / test).exists() for fault in faults for test in fault["tests"])
