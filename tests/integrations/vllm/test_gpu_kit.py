"""The stage of the GPU kit that runs vLLM, dry."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_engine_of_vllm_is_started_and_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--stages", "vllm", "--minutes", "30"]
    found = subprocess.run([*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3_000:] + found.stderr[-2_000:]
    rows = json.loads((tmp_path / "gpu-dry-run.json").read_text())["stages"]["vllm"]["rows"]
    assert {row["part"] for row in rows} == {"start", "permuted", "repeated", "none", "decode x 3"}
    assert len(rows) == 3 * 5 and not [row for row in rows if "failed" in row]
    alike = [row["tokens_as_in_place"] for row in rows if "tokens_as_in_place" in row]
    assert len(alike) == 4 and min(alike) > 0.9, "answers in place and by copies"
    of_permuted = [row["computed_tokens"] for row in rows if row["part"] == "permuted"]
    assert max(of_permuted[1:]) < of_permuted[0], "documents in a new order are not computed again"
