"""The home works without its annexes: nothing of it imports llama.cpp's, vLLM's or the lab's code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
ANNEXES = ("lab", "vllm", "llama")
OF_ANNEXES = ("adapt", "bench", "capacity", "deploy", "eval", "integrations", "llama", "real", "training")
"""Folders of their tests."""
PLACES = "cache/test_*.py layout/test_*.py prompt/test_d*.py engine/test_e*.py test_l*.py cli/test_d*.py"
_ANNEX = re.compile(rf"kvmosaic[./]({'|'.join(ANNEXES)})\b|\blab\.|[\"'-](plan|bench|eval|tune|adapt)[\"' \]]")
"""A module of theirs, or a command."""
_SUPPORT = re.compile(r"^\s*(?:from|import) (support(?:\.\w+)*)", re.MULTILINE)


@cache
def needs_annex(path: Path) -> bool:
    """Whether a file of tests, or one of `support` that it imports, names an annex."""
    text = path.read_text(encoding="utf-8")
    parts = (TESTS / f"{name.replace('.', '/')}.py" for name in _SUPPORT.findall(text))
    return bool(_ANNEX.search(text)) or any(needs_annex(part) for part in parts if part.exists())


def home_tests(*places: str) -> list[str]:
    """The test files of these places that need no annex."""
    files = (file for place in places for file in sorted(TESTS.glob(place)))
    own = (file for file in files if file.relative_to(TESTS).parts[0] not in OF_ANNEXES)
    return [str(file) for file in own if not needs_annex(file)]


@pytest.mark.slow
def test_without_the_three_folders_the_tests_of_the_home_pass(tmp_path: Path) -> None:
    """With `HOME_TESTS='**/test_*.py'` in the environment, all that are fast."""
    leave_out = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src/kvmosaic", tmp_path / "kvmosaic", ignore=leave_out)
    for annex in ANNEXES:
        shutil.rmtree(tmp_path / "kvmosaic" / annex)
    files = home_tests(*os.environ.get("HOME_TESTS", PLACES).split())
    assert len(files) >= 20
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not alone and not real",
    ]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{TESTS}"}
    done = subprocess.run([*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
