"""The tests that the Makefile runs by name exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TARGETS = ("test-all", "test-llama")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("short", ["SHORT=1", "SHORT="])
def test_every_test_that_is_named_exists(short: str) -> None:
    # what it would run, on a CPU with AVX-512, with all of its variables filled in
    command = ["make", "--dry-run", "--always-make", "WIDER=avx512", short, *TARGETS]
    env = {"PATH": os.environ["PATH"]}  # without the flags of a make that runs this
    said = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"\btests/[\w./]+(?:::\w+)*", said))
    assert len(named) > 15
    for name in named:
        path, _, test = name.partition("::")
        assert (ROOT / path).exists(), name
        assert not test or f"def {test}(" in (ROOT / path).read_text(), name
