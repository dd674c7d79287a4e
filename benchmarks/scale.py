"""What bookkeeping costs as it grows: pools, prefix cache, chunks, names and ledgers, up to millions of entries.

    PYTHONPATH=src python benchmarks/scale.py [--rounds 3] [--largest 1e7] [--parts "chunks" "ledger"]
    PYTHONPATH=src python benchmarks/scale.py --one chunks 100000

Every structure is filled in a process of its own (see `scale_parts.py`), sizes in turns: `--rounds` times, those of a
million entries and more once. Microseconds of CPU time of one thread per entry, medians over the rounds;
collections of the garbage happen as they do and are in them. Bytes are what the process has grown by, per entry, with
everything that the entry needs: pool, keys, tokens, indexes. No models, no tensors.

Writes results/scale.json, scale.md and, with matplotlib, scale.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from facts import RESULTS, save
from scale_parts import PARTS, Costs

SIZES: dict[str, list[int]] = {
    "block pool": [10**4, 10**5, 10**6, 10**7],
    "prefix cache": [10**4, 10**5, 10**6, 10**7],
    "prefix cache, priority": [10**4, 10**5, 10**6],
    "chunks": [10**3, 10**4, 10**5, 10**6],
    "chunks, priority": [10**3, 10**4, 10**5, 10**6],
    "ledger": [10**3, 10**4, 10**5, 10**6],
    "kept keys": [10**3, 10**4, 10**5, 10**6],
    "disk": [10**3, 10**4, 10**5],
    "hashing": [16, 128, 1_024, 8_192, 32_768],
}
ENTRIES = {
    "block pool": "blocks",
    "disk": "files",
    "hashing": "tokens per key",
    "chunks": "chunks of 10 blocks",
    "chunks, priority": "chunks of 10 blocks",
    "prefix cache": "blocks, in chains of 8",
    "prefix cache, priority": "blocks, in chains of 8",
}
DRAWN = [
    ("block pool", "take 10"),
    ("block pool", "take 10 single ones"),
    ("prefix cache", "insert"),
    ("prefix cache", "find"),
    ("prefix cache", "evict"),
    ("prefix cache, priority", "evict"),
    ("chunks", "plan, known"),
    ("chunks", "evict"),
    ("chunks, priority", "evict"),
    ("chunks", "statistics"),
    ("ledger", "evict"),
    ("kept keys", "evict and insert"),
]

Results = dict[str, dict[int, Costs]]


def measured(part: str, n: int) -> Costs:
    """One structure at one size, in a process of its own."""
    command = [sys.executable, __file__, "--one", part, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def measure(parts: list[str], rounds: int, largest: int) -> Results:
    """All structures at all sizes, in turns."""
    found: dict[tuple[str, int], list[Costs]] = {}
    for number in range(rounds):
        for part in parts:
            for n in SIZES[part]:
                if n <= largest and (number == 0 or n <= 10**5):
                    print(f"round {number + 1}: {part}, {n:,}", file=sys.stderr, flush=True)
                    found.setdefault((part, n), []).append(measured(part, n))
    results: Results = {}
    for (part, n), runs in found.items():
        names = runs[0]
        results.setdefault(part, {})[n] = {name: statistics.median(run[name] for run in runs) for name in names}
    return results


def shown(name: str, value: float) -> str:
    """Bytes as they are; what happens once in milliseconds; the rest in microseconds."""
    if name.startswith("bytes"):
        return f"{value:,.0f}" if value >= 1 else "too few to see"
    if name in ("create", "full collection", "block_map"):
        return f"{value / 1e3:,.3g} ms"
    return f"{value:.3g}"


def written(results: Results) -> str:
    """All results as tables in Markdown."""
    lines = [
        "# Scale",
        "",
        "Written by `benchmarks/scale.py`: bytes per entry, and microseconds of CPU time per entry.",
    ]
    for part, sizes in results.items():
        names = list(dict.fromkeys(name for costs in sizes.values() for name in costs))
        lines += ["", f"## {part}", "", f"| {ENTRIES.get(part, 'entries')} | " + " | ".join(names) + " |"]
        lines.append("|---" * (len(names) + 1) + "|")
        for n, costs in sorted(sizes.items()):
            lines.append(f"| {n:,} | " + " | ".join(shown(name, costs[name]) for name in names) + " |")
    return "\n".join(lines) + "\n"


def plot(results: Results) -> None:
    """Microseconds and bytes per entry by the number of entries."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = FigureCanvasAgg(Figure(figsize=(10.5, 4.6), layout="constrained")).figure
    times, sizes = figure.subplots(1, 2)
    for index, (part, name) in enumerate(DRAWN):
        if part in results:
            points = [(n, costs[name]) for n, costs in sorted(results[part].items())]
            style = {"marker": "o", "markersize": 3, "linestyle": "-" if index < 10 else "--"}
            times.plot(*zip(*points, strict=True), label=f"{part}: {name}", **style)
    for part, rows in results.items():
        points = [(n, costs["bytes"]) for n, costs in sorted(rows.items()) if costs.get("bytes", 0) >= 1]
        if points and "priority" not in part:
            sizes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=part)
    times.set(xscale="log", yscale="log", xlabel="entries", ylabel="µs of CPU time per entry", ylim=(0.5, 200))
    sizes.set(xscale="log", yscale="log", xlabel="entries", ylabel="bytes per entry", ylim=(10, 5_000))
    for axis in (times, sizes):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=6.5, ncols=2)
    figure.savefig(RESULTS / "scale.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", type=float, default=1e7)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--one", nargs=2, metavar=("PART", "N"), help="one structure at one size, as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        part, n = arguments.one
        print(json.dumps(PARTS[part](int(float(n)))))
        return
    results = measure(arguments.parts, arguments.rounds, int(arguments.largest))
    path = RESULTS / "scale.json"
    before: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    merged = {part: {int(n): costs for n, costs in rows.items()} for part, rows in before.items()}
    merged = {part: rows for part, rows in (merged | results).items() if part in PARTS}
    save("scale", {"python": sys.version.split()[0], "results": merged})
    (RESULTS / "scale.md").write_text(written(merged))
    plot(merged)
    print(written(results))


if __name__ == "__main__":
    main()
