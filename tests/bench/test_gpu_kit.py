"""The kit for a GPU: dry-run as a whole; a stage or a part of it that fails costs the others nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def checkout_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.slow
def test_a_dry_run_fails_nowhere(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--minutes", "30", "--out", tmp_path]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3_000:] + found.stderr[-2_000:]
    report = json.loads((tmp_path / "gpu-dry-run.json").read_text())
    assert [stage["ended"] for stage in report["stages"].values()] == ["exit status 0"] * 4 + ["vLLM is not installed"]
    parts = {row["part"] for stage in report["stages"].values() for row in stage["rows"]}
    assert {"captured", "compiled", "greedy tokens", "first token", "step", "tests of the kernels"} <= parts
    assert "equal to dense ones: 4 of 4" in (tmp_path / "gpu-dry-run.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu-dry-run.json", "gpu-dry-run.md"]


def test_a_part_that_fails_is_saved_with_its_reason_and_the_next_one_begins(tmp_path: Path) -> None:
    from benchmarks.gpu.stage import Stage

    path = tmp_path / "rows.json"
    stage = Stage(path, 9.0, dry_run=True)
    with stage.part("first") as row:
        row["before"] = 1
        raise RuntimeError("the device is gone " + "x" * 9_000)
    assert json.loads(path.read_text())["rows"][0]["before"] == 1
    with stage.part("second", shape="2 x 3") as row:
        row["seconds"] = stage.seconds(lambda: None)
    first, second = json.loads(path.read_text())["rows"]
    assert first["failed"].startswith("Traceback") and len(first["failed"]) < 2_500
    assert second["shape"] == "2 x 3" and second["seconds"] >= 0 and "failed" not in second


@pytest.mark.slow
def test_a_stage_that_hangs_is_stopped_and_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import __main__ as kit

    hangs = f"""import time; open({str(tmp_path / "graphs.json")!r}, "w").write('{{"rows": [1]}}'); time.sleep(99)"""
    start = subprocess.Popen
    monkeypatch.setattr(kit.subprocess, "Popen", lambda _, **options: start([sys.executable, "-c", hangs], **options))
    found = kit.run_stage("graphs", 3.0, tmp_path, dry_run=True)
    assert found["rows"] == [1] and found["ended"] == "stopped after 3 s"


def test_what_matters_comes_first_and_failures_are_shown() -> None:
    from benchmarks.gpu.report import written

    def decode(kind: str, seconds: float) -> dict[str, Any]:
        return {"part": "decode", "model": "8b", "kind": kind, "requests": 32, "seconds_per_step": seconds}

    first = {"part": "permuted", "documents": "8 x 2,048"}
    rows = [
        *({"part": "one", "dtype": dtype, "ratio": ratio} for dtype, ratio in (("float32", 1.25), ("bfloat16", 0.9))),
        {"part": "greedy tokens", "same": 32, "of": 32},
        *(decode("private", 0.03), decode("shared", 0.02)),
        *({**first, "engine": "vLLM", "first_seconds": 0.6}, {**first, "engine": "in place", "first_seconds": 0.03}),
        {"part": "captured", "stream": "video", "failed": "Traceback\nRuntimeError: no graph"},
    ]
    text = written({"about": {"device": "One"}, "stages": {"all": {"rows": rows, "ended": "exit status 1"}}})
    assert "error of our attention / of torch's own in the same type: at most 1.25" in text
    assert "greedy tokens of composed prompts equal to dense ones: 32 of 32" in text
    assert "a step of 32 requests, documents of their own / shared: 1.50x" in text
    assert "8 x 2,048, first token, permuted: vLLM / in place: 20.00x" in text
    assert "    RuntimeError: no graph" in text and "## all: exit status 1" in text
