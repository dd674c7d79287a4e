"""Load on `kvmosaic serve` by guidellm: requests per second and times, with unknown and with known documents.

    make load                                         installs guidellm into .venv-load, and runs this
    python benchmarks/load.py [--guidellm PATH] [--requests 64] [--streams 4] [--documents 8] [--words 60]

guidellm is an independent load generator for OpenAI-compatible servers. It sends chat messages whose document parts are
marked with `cache_control`, which kvmosaic takes as documents. Three runs against one server, each request with a
question of its own:

    cold        every request brings documents that were never seen
    warm        all requests draw from one set of known documents, in a new order each time
    unmarked    the same requests as in warm, without marks: ordinary prompts, with prefix caching

Everything is offline: the tokenizer that guidellm wants is the bundled one. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import httpx
from facts import RESULTS, save
from rich.console import Console
from rich.table import Table
from serving import Served, made_up_text

ROOT = Path(__file__).parents[1]
READER = ROOT / "src" / "kvmosaic" / "bundled" / "reader"
WARMING = "warming"
RUNS = ("cold", "warm", "unmarked")
ANSWER_TOKENS = 16
PERCENTILES = ("p50", "p95", "p99")
FIGURES = {"time_to_first_token_ms": "TTFT, ms", "inter_token_latency_ms": "ITL, ms"}


def find_guidellm(given: Path | None) -> str:
    """The program: as given, as $GUIDELLM says, from .venv-load, or from the path."""
    mine = ROOT / ".venv-load" / "bin" / "guidellm"
    found = given or os.environ.get("GUIDELLM") or (mine if mine.exists() else shutil.which("guidellm"))
    if not found:
        raise SystemExit("guidellm is not installed: run `make load`, or name it with --guidellm or GUIDELLM")
    return str(found)


def write_requests(path: Path, run: str, arguments: argparse.Namespace) -> None:
    """One line per request, in the form that guidellm reads."""
    source = random.Random(arguments.seed)
    known = [made_up_text(source, arguments.words) for _ in range(arguments.documents)]
    if run in ("cold", WARMING):
        source = random.Random(f"{run} {arguments.seed}")
    with path.open("w") as file:
        for _ in range(arguments.requests):
            texts = [made_up_text(source, arguments.words) for _ in known] if run == "cold" else known
            mark = {} if run == "unmarked" else {"cache_control": {"type": "ephemeral"}}
            parts = [{"type": "text", "text": text} | mark for text in source.sample(texts, len(texts))]
            parts.append({"type": "text", "text": f"What does {made_up_text(source, 4)[:-1]} mean?"})
            messages = [{"role": "system", "content": "Answer from the documents."}, {"role": "user", "content": parts}]
            file.write(json.dumps({"messages": messages, "output_tokens_count": ANSWER_TOKENS}) + "\n")


def generate_load(guidellm: str, url: str, data: Path, report: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs guidellm once, and gives the figures of its report."""
    command = [guidellm, "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={url}"]
    command += ["--profile", f"kind=concurrent,streams={arguments.streams}"]
    command += ["--constraint", f"kind=max_requests,count={arguments.requests}"]
    command += ["--tokenizer", f"kind=hf_auto,model={READER}"]
    command += ["--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={report}"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(data.parent / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    if done.returncode != 0 or not report.exists():
        raise RuntimeError(f"guidellm failed:\n{done.stdout[-2_000:]}{done.stderr[-2_000:]}")
    return figures_of(json.loads(report.read_text())["benchmarks"][0])


def chunk_counts(url: str) -> dict[str, int]:
    """Documents looked up and found so far, as the server counts them."""
    text = httpx.get(f"{url}/metrics").raise_for_status().text
    return {
        name: int(float(value))
        for name, value in re.findall(r"^kvmosaic:chunk_(lookups|hits)_total\{.*?\} (\S+)", text, re.MULTILINE)
    }


def figures_of(benchmark: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a report of guidellm."""
    metrics, requests = benchmark["metrics"], benchmark["requests"]["successful"]
    totals = metrics["request_totals"]
    if totals["successful"] != totals["total"] or not requests:
        raise RuntimeError(f"not every request was answered: {totals}")
    begin = min(request["request_start_time"] for request in requests)
    end = max(request["request_end_time"] for request in requests)
    figures: dict[str, Any] = {"requests": len(requests), "requests_per_second": len(requests) / (end - begin)}
    figures["prompt_tokens"] = metrics["prompt_token_count"]["successful"]["median"]
    for name in FIGURES:
        percentiles = metrics[name]["successful"]["percentiles"]
        figures[name] = {key: percentiles[key] for key in PERCENTILES}
    return figures


def table_of(runs: dict[str, dict[str, Any]], streams: int) -> Table:
    """The figures as they are printed."""
    table = Table("", "requests/s", "documents found", title=f"guidellm, {streams} at once")
    for title in FIGURES.values():
        for key in PERCENTILES:
            table.add_column(f"{title} {key}", justify="right")
    for run, figures in runs.items():
        times = [f"{figures[name][key]:.1f}" for name in FIGURES for key in PERCENTILES]
        found = f"{figures['document_hits']} of {figures['document_lookups']}"
        table.add_row(run, f"{figures['requests_per_second']:.1f}", found, *times)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, help="the program; default: $GUIDELLM, or .venv-load/bin/guidellm")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--words", type=int, default=60, help="of each document")
    parser.add_argument("--runs", nargs="+", default=RUNS, choices=RUNS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the result")
    arguments = parser.parse_args()
    guidellm = find_guidellm(arguments.guidellm)
    version = subprocess.run([guidellm, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name, Served("reader", "--uvicorn-log-level", "warning") as server:
        folder = Path(name)
        for run in (WARMING, *arguments.runs):  # the first one makes the documents known, with questions of its own
            data, report = folder / f"{run}.jsonl", folder / f"{run}.json"
            write_requests(data, run, arguments)
            before = chunk_counts(server.url)
            runs[run] = generate_load(guidellm, server.url, data, report, arguments)
            runs[run] |= {f"document_{name}": count - before[name] for name, count in chunk_counts(server.url).items()}
    del runs[WARMING]
    Console(width=140).print(table_of(runs, arguments.streams))
    settings = {key: value for key, value in vars(arguments).items() if key not in ("guidellm", "results")}
    save("load-reader", {"tool": version, "model": "reader", "arguments": settings, "runs": runs}, arguments.results)


if __name__ == "__main__":
    main()
