"""The report of a run: what was measured where, as tables with the ratios that matter first."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.facts import commit

LAUNCHED = "decode, launched one by one"
"""The part that decodes without CUDA graphs."""
_FACTS = """
import json, platform, torch
found = {"python": platform.python_version(), "torch": torch.__version__, "device": "cpu", "cuda": torch.version.cuda}
if torch.cuda.is_available():
    about = torch.cuda.get_device_properties(0)
    found |= {"device": about.name, "memory_bytes": about.total_memory, "capability": f"{about.major}.{about.minor}"}
for name in ("triton", "transformers", "vllm"):
    try:
        from importlib.metadata import version
        found[name] = version(name)
    except Exception:
        pass
print(json.dumps(found))
"""


def facts(*, dry_run: bool) -> dict[str, Any]:
    """Device and versions, asked of another process: this one must not hold the device."""
    found = subprocess.run([sys.executable, "-c", _FACTS], capture_output=True, text=True, check=True)
    about: dict[str, Any] = json.loads(found.stdout)
    return {**about, "device": "dry-run" if dry_run else about["device"], "commit": commit()}


def written(report: Mapping[str, Any]) -> str:
    """Markdown."""
    about = ", ".join(f"{key} {value}" for key, value in report["about"].items() if value is not None)
    lines = ["# On a GPU", "", "Written by `python -m benchmarks.gpu`.", "", f"{about}.", ""]
    stages = report["stages"]
    lines += [f"- {line}" for line in headlines(stages)]
    for name, stage in stages.items():
        lines += ["", f"## {name}: {stage['ended']}{', commit ' + stage['commit'] if 'commit' in stage else ''}", ""]
        lines += [*stage["notes"], ""] if "notes" in stage else []
        for part, rows in _by_part(stage["rows"]):
            lines += [f"### {part}", "", *_table(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def headlines(stages: Mapping[str, Any]) -> Iterator[str]:
    """The ratios that are asked first, as far as they were measured."""
    rows = [row for stage in stages.values() for row in stage["rows"]]
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if ratios:
        yield f"error of our attention / of torch's own in the same type: at most {max(ratios):.2f}"
    for row in rows:
        if row["part"] == "greedy tokens" and "same" in row:
            yield f"greedy tokens of composed prompts equal to dense ones: {row['same']} of {row['of']}"
    for key, ours in _found(rows, "first token", "model", "documents").items():
        theirs = _found(rows, "transformers", "model", "documents").get(key)
        if theirs and "permuted_seconds" in ours and "prefill_seconds" in theirs:
            ratio = theirs["prefill_seconds"] / ours["permuted_seconds"]
            yield f"{key}: first token of permuted documents, transformers / ours: {ratio:.1f}x"
    decoded = {(row["model"], row["kind"]): row for row in rows if row["part"] == "decode" and "kind" in row}
    for (model, kind), row in decoded.items():
        private = decoded.get((model, "private"), {})
        if kind == "shared" and "seconds_per_step" in row and "seconds_per_step" in private:
            ratio = private["seconds_per_step"] / row["seconds_per_step"]
            yield f"{model}: a step of {row['requests']} requests, documents of their own / shared: {ratio:.2f}x"
    for row in rows:
        replayed = decoded.get((row.get("model"), row.get("kind")), {})
        if row["part"] == LAUNCHED and "seconds_per_step" in row and "seconds_per_step" in replayed:
            ratio = row["seconds_per_step"] / replayed["seconds_per_step"]
            about = f"{row['model']}: a step of {row['requests']} (documents: {row['kind']})"
            yield f"{about}, launched one by one / replayed: {ratio:.1f}x"
    for part, documents, engine, ratio in vllm_ratios(rows):
        yield f"{documents}, {part}: vLLM / {engine}: {ratio:.2f}x"


def vllm_ratios(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, str, float]]:
    """Work, documents, engine, and how many times as long vLLM without the plugin takes; first tokens before steps."""
    vllm = {
        (row["part"], row["documents"], row["engine"]): row for row in rows if "engine" in row and "documents" in row
    }
    for figure, name in (("first_seconds", "first token"), ("seconds_per_step", "step")):
        for (part, documents, engine), row in vllm.items():
            plain = vllm.get((part, documents, "vLLM"), {})
            if engine != "vLLM" and figure in row and figure in plain:
                yield f"{name}, {part}", documents, engine, plain[figure] / row[figure]


def plot(report: Mapping[str, Any], path: Path) -> None:
    """First tokens and steps beside vLLM without the plugin."""
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        return
    ratios = list(vllm_ratios(report["stages"].get("vllm", {"rows": []})["rows"]))
    if not ratios:
        return
    figure, axis = plt.subplots(figsize=(9, 5), layout="constrained")
    places = list(dict.fromkeys((documents, part) for part, documents, _, _ in ratios))
    for number, engine in enumerate(dict.fromkeys(engine for _, _, engine, _ in ratios)):
        found = {(documents, part): ratio for part, documents, of, ratio in ratios if of == engine}
        rows = [(index, found[place]) for index, place in enumerate(places) if place in found]
        heights, lengths = [-index - 0.38 * number for index, _ in rows], [ratio - 1 for _, ratio in rows]
        bars = axis.barh(heights, lengths, 0.36, left=1, label=engine)
        axis.bar_label(bars, [f" {ratio:.3g}x" for _, ratio in rows], fontsize=8)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}x")
    axis.margins(x=0.1)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(
        [-index - 0.19 for index in range(len(places))], [f"{part}\n{documents}" for documents, part in places]
    )
    axis.tick_params(axis="y", labelsize=8)
    axis.set_title(f"vLLM / vLLM with kvmosaic, seconds; {report['about']['device']}, 8 B, bfloat16", fontsize=10)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _found(rows: Sequence[Mapping[str, Any]], part: str, *keys: str) -> dict[str, Mapping[str, Any]]:
    return {" ".join(str(row[key]) for key in keys): row for row in rows if row["part"] == part}


def _by_part(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    parts = dict.fromkeys(row["part"] for row in rows)
    for part in parts:
        yield part, [row for row in rows if row["part"] == part]


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in ("part", "failed", "longest")))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_shown(row.get(column, "")) for column in columns) + " |" for row in rows]
    failures = [f"    {line}" for row in rows if "failed" in row for line in ["", *row["failed"].strip().splitlines()]]
    return [*lines, *(["", *failures] if failures else [])]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
