"""guidellm, an independent load generator, against the real server: by benchmarks/load.py, for a few requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDELLM = Path(os.environ.get("GUIDELLM", ROOT / ".venv-load" / "bin" / "guidellm"))


@pytest.mark.skipif(
    not GUIDELLM.exists(), reason="guidellm is not installed: `make load` puts it into .venv-load, or set GUIDELLM"
)
def test_guidellm_is_answered_and_finds_known_documents(tmp_path: Path) -> None:
    small = ("--requests", "4", "--streams", "2", "--documents", "3", "--words", "12", "--runs", "cold", "warm")
    command = (sys.executable, "benchmarks/load.py", "--guidellm", str(GUIDELLM), *small, "--results", str(tmp_path))
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    report = json.loads((tmp_path / "load-reader.json").read_text())
    assert {name: figures["requests"] for name, figures in report["runs"].items()} == {"cold": 4, "warm": 4}
    counts = {name: (run["document_hits"], run["document_lookups"]) for name, run in report["runs"].items()}
    assert counts == {"cold": (0, 12), "warm": (12, 12)}
    assert all(run["time_to_first_token_ms"]["p50"] > 0 for run in report["runs"].values())
