"""Measures kvmosaic on one GPU, in minutes; most important first, and every stage saved before the next one begins.

    python -m benchmarks.gpu --minutes 11 [--stages numbers engine] [--out benchmarks/results]
    python -m benchmarks.gpu --dry-run           on a CPU: interpreted kernels, tiny shapes; two minutes

Run it in the root of a checkout. A stage is a process with a time limit of its own: one that fails or hangs costs the
others nothing, and what it had measured stays. Without vLLM its stage is left out.

    limits     copies, reads, a square product, a launch: what every other figure is set against
    numbers    attention by Triton and by torch against float64, in three types; the kernels' own tests
    graphs     BlockKVCache captured in a CUDA graph, and compiled, against its eager twin
    engine     random models of 0.5 and 8 billion parameters: first token, decode, sharers, memory; beside transformers
    vllm       vLLM plain, with documents in place, with documents by copies: first token, decode

Writes gpu-DEVICE.json, .md and .png; stages that are not run again keep what they found. Ratios say what the
method does; absolute times belong to the device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
for folder in ("tests", "benchmarks", "src"):
    sys.path.insert(0, str(ROOT / folder))

STAGES = {"limits": 40.0, "numbers": 130.0, "graphs": 60.0, "engine": 180.0, "vllm": 330.0}
"""Seconds that each may take at most; the order is that of a run."""
_GRACE_SECONDS = 5.0


def run_stage(name: str, seconds: float, folder: Path, *, dry_run: bool) -> dict[str, Any]:
    """What a stage has measured, and how it ended."""
    path = folder / f"{name}.json"
    path.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu",
        "--child",
        name,
        "--out",
        str(path),
        "--minutes",
        str(seconds / 60),
    ]
    begin = time.monotonic()
    process = subprocess.Popen([*command, *["--dry-run"] * dry_run], cwd=ROOT, start_new_session=True)
    try:
        ended = f"exit status {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        ended = f"stopped after {seconds:.0f} s"
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = json.loads(path.read_text()) if path.exists() else {"rows": []}
    return {**found, "ended": ended, "seconds": round(time.monotonic() - begin, 1)}


def run_child(name: str, path: Path, seconds: float, *, dry_run: bool) -> None:
    """Runs one stage in this process."""
    os.environ |= {
        "TRITON_INTERPRET": "1" if dry_run else "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if dry_run:
        os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    from benchmarks.gpu.stage import Stage

    stage = Stage(path, seconds, dry_run=dry_run)
    importlib.import_module(f"benchmarks.gpu.{name}").measure(stage)


def main() -> int:
    """The command; 1 if a part has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=11.0, help="of all stages together")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--child", choices=STAGES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        run_child(given.child, given.out, given.minutes * 60, dry_run=given.dry_run)
        return 0
    from benchmarks.gpu.report import facts, plot, written

    end = time.monotonic() + given.minutes * 60
    about = facts(dry_run=given.dry_run)
    name = "gpu-" + re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    given.out.mkdir(parents=True, exist_ok=True)
    scratch = given.out / f"{name}-stages"
    scratch.mkdir(exist_ok=True)
    path = given.out / f"{name}.json"
    report: dict[str, Any] = {"stages": {}, **(json.loads(path.read_text()) if path.exists() else {}), "about": about}
    for stage in given.stages:
        if stage == "vllm" and importlib.util.find_spec("vllm") is None:
            report["stages"].setdefault(stage, {"rows": [], "ended": "vLLM is not installed"})
        elif (left := end - time.monotonic()) < _GRACE_SECONDS * 2:
            report["stages"].setdefault(stage, {"rows": [], "ended": "no time was left"})
        else:
            print(f"== {stage}", flush=True)
            seconds = min(STAGES[stage] * (5 if given.dry_run else 1), left - _GRACE_SECONDS)
            found = run_stage(stage, seconds, scratch, dry_run=given.dry_run)
            report["stages"][stage] = {**found, "commit": about["commit"]}
        print(f"== {stage}: {report['stages'][stage]['ended']}", flush=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        path.with_suffix(".md").write_text(written(report))
    for part in scratch.iterdir():
        part.unlink()
    scratch.rmdir()
    plot(report, path.with_suffix(".png"))
    print(written(report))
    run = [report["stages"][stage] for stage in given.stages]
    failed = [row for stage in run for row in stage["rows"] if "failed" in row]
    ended_well = all(stage["ended"] in ("exit status 0", "vLLM is not installed") for stage in run)
    return int(bool(failed) or not ended_well)


if __name__ == "__main__":
    sys.exit(main())
