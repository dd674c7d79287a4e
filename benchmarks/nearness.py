"""Nearness to full attention on real questions: puts results of `kvmosaic tune --json` into one table and one plot.

    python scripts/fetch_xquad.py data
    kvmosaic tune MODEL --dtype float32 --data data/xquad.en.json --cases 200 --documents-per-prompt 3 \
        --strategies sequential --repair "none,first(8),query(0.08),query(0.15)" --json > "en, 3 documents.json"
    python benchmarks/nearness.py smollm2-xquad "en, 3 documents.json" "de, 3 documents.json"

The name of a file is the heading of its table. Only figures are kept, no text of questions or answers. Results go to
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from facts import RESULTS, save

COLUMNS = "positions | documents saw | repair | divergence | equal greedy tokens | loss | repaired | work | first token"
SAW = {"system": "system text", "companions": "system text, companions", "none": "nothing"}
LEGEND = (
    "Divergence from full attention in nats per token, over the tokens of full attention's own greedy answer; equal "
    "greedy tokens: share of them that would have been chosen; loss: of the accepted answer, in nats per token, beside "
    "full attention; repaired: documents' tokens computed again; work: layers computed for choosing and repairing, "
    "100% is computing all documents once; first token: by that of full attention, one at a time, documents known."
)


def named(way: dict[str, Any]) -> str:
    """What repairs, and the adapter beside it, as `kvmosaic eval` names them."""
    return f"{way['repair']} + {way['adapter']}" if way.get("adapter") else way["repair"]


def line_of(summary: dict[str, Any], full: dict[str, Any]) -> str:
    way = summary["way"]
    cells = [
        way["strategy"],
        SAW[way["context"]],
        f"`{named(way)}`",
        f"{summary['divergence']:.4f}",
        f"{summary['agreement']:.1%}",
        f"{summary['loss_increase']:+.3f}",
        f"{summary['repaired']:.1%}",
        f"{summary['work']:.1%}",
        f"{summary['first_median'] / full['first_median']:.0%}",
    ]
    return f"| {' | '.join(cells)} |"


def section_of(name: str, found: dict[str, Any]) -> list[str]:
    full = next(summary for summary in found["summaries"] if summary["way"]["repair"] == "full")
    (task,) = found["profile"]["measured"]["tasks"]
    lines = [f"## {name}", "", f"{task['cases']} questions; loss of full attention {full['loss']:.2f}.", ""]
    lines += [f"| {COLUMNS} |", "|---" * (COLUMNS.count("|") + 1) + "|"]
    return [*lines, *(line_of(each, full) for each in found["summaries"] if each is not full), ""]


def draw(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Divergence by work, a panel for each run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = FigureCanvasAgg(Figure(figsize=(4.2 * len(runs), 4.2), layout="constrained")).figure
    first = None
    for number, (name, found) in enumerate(runs.items(), start=1):
        axes = figure.add_subplot(1, len(runs), number, sharey=first)
        first = first or axes
        groups: dict[str, list[dict[str, Any]]] = {}
        for each in found["summaries"]:
            if each["way"]["repair"] != "full":
                groups.setdefault(f"{each['way']['strategy']}, {SAW[each['way']['context']]}", []).append(each)
        for label, group in groups.items():
            group = sorted(group, key=lambda each: each["work"])
            axes.plot(
                [100 * each["work"] for each in group], [each["divergence"] for each in group], "o", label=label, ms=4
            )
            for each in group:
                place = (100 * each["work"], each["divergence"])
                axes.annotate(named(each["way"]), place, (3, 3), textcoords="offset points", fontsize=6)
        axes.set(title=name, xlabel="work, % of computing all documents once", yscale="log")
        axes.grid(alpha=0.3)
        if number == 1:
            axes.set_ylabel("divergence from full attention, nats per token")
    handles = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False
    )
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    runs = {file.stem: json.loads(file.read_text()) for file in arguments.files}
    about = next(iter(runs.values()))
    machine = about["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"# {arguments.name}: nearness to full attention",
        "",
        f"{machine['processor']}, {machine['threads']} thread(s); {versions}",
        "",
    ]
    for name, found in runs.items():
        lines += section_of(name, found)
    name = f"nearness-{arguments.name}"
    RESULTS.joinpath(f"{name}.md").write_text("\n".join([*lines, LEGEND]) + "\n")
    kept = {run: {key: found[key] for key in ("summaries", "machine", "seconds")} for run, found in runs.items()}
    save(name, {"runs": kept})
    draw(runs, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
