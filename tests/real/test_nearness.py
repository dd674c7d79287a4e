"""`kvmosaic tune` on documents of one's own: what it picks is near to full attention on real weights.

On 200 questions of XQuAD the same way has 0.0033 nats and 97.7% (benchmarks/results/nearness-smollm2-xquad.md); four
questions are too few for the second figure, and the first has a wide margin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

DOCUMENTS = Path(__file__).parents[2] / "examples" / "documents"
QUESTIONS = (
    "When was Fenbury founded?",
    "Who is the captain of the Amber Pearl?",
    "How high is the Corlow Lighthouse?",
    "In which month does the regatta take place?",
)


def test_what_tune_picks_is_near_to_full_attention(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text("\n".join(QUESTIONS) + "\n")
    command = [sys.executable, "-m", "kvmosaic", "tune", str(model_folder), "--documents", str(DOCUMENTS)]
    command += ["--questions", str(tmp_path / "questions.txt"), "--contexts", "system,companions", "--dtype", "float32"]
    command += ["--strategies", "sequential", "--repair", "none,query(0.15)", "--json", "--max-divergence", "0.02"]
    command += ["--min-agreement", "0.95", "--profile", str(tmp_path / "profile.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "CI": "1"})
    assert done.returncode == 0, done.stderr[-2_000:]
    found = json.loads(done.stdout)
    assert found["profile"]["goal"]["is_reached"]
    assert found["profile"]["chunk_context"] == "companions"
    by_way = {(each["way"]["context"], each["way"]["repair"]): each for each in found["summaries"]}
    best, context_free = by_way["companions", "query(0.15)"], by_way["system", "none"]
    assert best["divergence"] < 0.02
    assert best["agreement"] >= 0.95
    assert best["repaired"] <= 0.15
    assert best["divergence"] < context_free["divergence"] / 2
