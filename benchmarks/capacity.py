"""What capacity planning says of the time to the first token, against what was measured.

    python benchmarks/capacity.py

Nothing is measured here: `kvmosaic bench` wrote how fast the machine was, and how long prompts took in that run, into
results/bench-*.json. The prediction gets the first and is compared with the second. Results: results/capacity.md
"""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from facts import RESULTS

from kvmosaic.bench.models import RANDOM_MODELS
from kvmosaic.capacity import Demand, ModelFacts, Speed
from kvmosaic.capacity.machine import MEASURED_SHARE
from kvmosaic.capacity.meta_count import build_without_memory, count
from kvmosaic.capacity.speed import FirstToken

DTYPE = "bfloat16"


def facts_of(name: str) -> ModelFacts:
    """A random model of `kvmosaic bench`."""
    config = transformers.LlamaConfig(**RANDOM_MODELS[name], bos_token_id=None, eos_token_id=None)
    return count(build_without_memory(config, getattr(torch, DTYPE)), name)


def predicted(workload: str, model: ModelFacts, speed: Speed, sizes: dict[str, int]) -> float | None:
    """Seconds to the first token; None for workloads that are something else."""
    whole = Demand(
        10**6, sizes["document_tokens"], 1, sizes["documents"], sizes["system"], sizes["question"], answer_tokens=1
    )
    if workload == "question":
        bare = replace(whole, tokens_per_document=1, documents_per_prompt=1)
        return FirstToken(model, speed, bare).prompt_seconds(0)
    if match := re.fullmatch(r"zipf-(\d+)%", workload):
        drawn = replace(whole, documents_per_prompt=sizes["zipf_documents"])
        return FirstToken(model, speed, drawn).expected_seconds(int(match[1]) / 100)
    missing = {"fresh": sizes["documents"], "permuted": 0}.get(workload)
    return None if missing is None else FirstToken(model, speed, whole).prompt_seconds(missing)


def rows_of(report: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Workload, seconds measured and predicted."""
    limits = report["limits"]
    reads = limits["read_bytes_per_second"][str(limits["threads"])]
    speed = Speed(limits["flops_per_second"][DTYPE], reads, "measured").times(MEASURED_SHARE, "measured")
    model, found = facts_of(report["model"]), []
    for row in report["rows"]:
        if row["peer"] != "kvmosaic" or row["dtype"] != DTYPE or not row["first_seconds"]:
            continue
        seconds = predicted(row["workload"], model, speed, report["sizes"])
        middle = statistics.fmean if row["workload"].startswith("zipf") else statistics.median
        if seconds is not None:
            found.append((row["workload"], middle(row["first_seconds"]), seconds))
    return found


def main() -> None:
    """Writes a table."""
    lines = ["# Capacity planning: first token, predicted and measured", ""]
    lines += [
        f"Written by `benchmarks/capacity.py`: {DTYPE}, {MEASURED_SHARE:.0%} of the measured products and reads.",
        "",
    ]
    lines += ["| run | workload | measured, ms | predicted, ms | predicted by measured |", "|---" * 5 + "|"]
    for path in sorted(Path(RESULTS).glob("bench-*.json")):
        report = json.loads(path.read_text())
        for workload, measured, seconds in rows_of(report):
            ratio = seconds / measured
            lines.append(f"| {path.stem} | {workload} | {1e3 * measured:.1f} | {1e3 * seconds:.1f} | {ratio:.2f} |")
    text = "\n".join(lines) + "\n"
    (RESULTS / "capacity.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
