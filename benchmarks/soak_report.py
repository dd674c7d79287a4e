"""The report of a soak: all its parts joined, as JSON, Markdown and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from facts import save
from soak_seen import Latencies, merged, read_lines
from soak_verdict import Check, Sample, checks, growths, totals, verdict

TIMED = ("ttft", "answer", "livez", "readyz", "metrics")
SHOWN_FAULTS = 20
DRAWN_POINTS = 1_500
MEMORY = ("rss_mb", "anonymous_mb", "pss_mb")


class Record:
    """Everything that was written into the folder of a soak, by all of its parts."""

    def __init__(self, folder: Path) -> None:
        lines = read_lines(folder / "samples.jsonl")
        self.starts = [line for line in lines if line["kind"] == "start"]
        self.samples: list[Sample] = [line for line in lines if line["kind"] == "sample"]
        self.ends = [line for line in lines if line["kind"] == "end"]
        self.faults = read_lines(folder / "faults.jsonl")

    @property
    def seconds(self) -> float:
        """Under load, in all parts together."""
        last: dict[int, float] = {}
        for sample in self.samples:
            last[sample["part"]] = sample["elapsed"]
        return sum(last.values())


def write_report(record: Record, livez_seconds: float, folder: Path) -> list[Check]:
    """Writes soak.json, soak.md and, with matplotlib, soak.png; returns what must hold."""
    found = checks(record.samples, record.ends, record.faults, livez_seconds)
    report = {
        "passed": all(check.holds for check in found),
        "verdict": verdict(found),
        "hours": round(record.seconds / 3600, 3),
        "checks": [asdict(check) for check in found],
        "parts": record.starts,
        "ends": record.ends,
        "counts": totals(record.samples),
        "latencies": {name: _quantiles(merged(record.samples, name)) for name in TIMED},
        "growth": [asdict(growth) for growth in growths(record.samples) if growth.hours],
        "last": _last(record.samples),
        "faults": record.faults[:SHOWN_FAULTS],
    }
    save("soak", report, folder)
    (folder / "soak.md").write_text(written(report))
    plot(record.samples, folder / "soak.png")
    return found


def _last(samples: Sequence[Sample]) -> Sample:
    """The last figures of a server that lived."""
    last = next((sample for sample in reversed(samples) if "rss_mb" in sample), {})
    return {name: value for name, value in last.items() if name not in ("counts", "latencies")}


def written(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    lines = [
        "# Soak",
        "",
        f"Written by `benchmarks/soak.py`: **{report['verdict']}**, after "
        f"{report['hours']:.2f} hours of load, parts: {len(report['parts'])}.",
        "",
        "| what must hold | | found |",
        "|---|---|---|",
        *(
            f"| {each['name']} | {'yes' if each['holds'] else '**NO**'} | {each['found']} |"
            for each in report["checks"]
        ),
        "",
        "Growth is the Theil-Sen slope of the floors of twelve blocks of time, over the second half of each part; it "
        "fails if the lower end of its 95 % interval is above the bound and the rise is one that matters.",
        "",
        "| part | begun | commit | machine | load before | known answers | seed | ended |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ends = {end["part"]: end["how"] for end in report["ends"]}
    for start in report["parts"]:
        row = [start["part"], _time(start["at"]), start["commit"], start["processor"], f"{start['load_average']:.1f}"]
        row += [f"{start['known']} of {start['asked']}", start["seed"], ends.get(start["part"], "cut off")]
        lines.append("| " + " | ".join(map(str, row)) + " |")
    lines += ["", "| latency, seconds | times | p50 | p99 | p99.9 |", "|---|---|---|---|---|"]
    for name, times in report["latencies"].items():
        cells = [f"{times[part]:.3f}" if times[part] is not None else "" for part in ("p50", "p99", "p99.9")]
        lines.append(f"| {name} | {times['times']:,} | " + " | ".join(cells) + " |")
    lines += ["", "| counted | times |", "|---|---|"]
    lines += [f"| {name} | {number:,} |" for name, number in report["counts"].items()]
    lines += ["", "| grows by | part | hours | an hour | from | to |", "|---|---|---|---|---|---|"]
    for grown in report["growth"]:
        slopes = " | ".join(f"{grown[name]:+.2f}" for name in ("slope", "low", "high"))
        lines.append(f"| {grown['name']} | {grown['part']} | {grown['hours']:.2f} | {slopes} |")
    if report["faults"]:
        lines += ["", "## Faults, the first ones", ""]
        lines += [f"- part {fault['part']}, {_time(fault['at'])}: `{_quoted(fault)}`" for fault in report["faults"]]
    return "\n".join(lines) + "\n"


def _quoted(fault: dict[str, Any]) -> str:
    return "; ".join(f"{name}: {value}" for name, value in fault.items() if name not in ("part", "at")).replace(
        "`", "'"
    )


def _quantiles(latencies: Latencies) -> dict[str, Any]:
    return {
        "times": latencies.counts.total(),
        "p50": latencies.at(0.5),
        "p99": latencies.at(0.99),
        "p99.9": latencies.at(0.999),
    }


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def plot(samples: Sequence[Sample], path: Path) -> None:
    """Memory, descriptors and threads, latencies, answers, blocks and tiers, over the hours of all parts."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return
    if not samples:
        return
    figure = FigureCanvasAgg(Figure(figsize=(13, 8.5), layout="constrained")).figure
    (memory, held, waits), (answers, blocks, tiers) = figure.subplots(2, 3)
    groups = _grouped(samples)
    hours = _hours(groups)

    def line(axis: Any, label: str, values: Sequence[float | None], **style: Any) -> None:
        points = [(hour, value) for hour, value in zip(hours, values, strict=True) if value is not None]
        if points:
            axis.plot(*zip(*points, strict=True), label=label, linewidth=0.9, **style)

    last = [group[-1] for group in groups]
    for name in MEMORY:
        line(memory, name.removesuffix("_mb"), [sample.get(name) for sample in last])
    line(memory, "the soak's clients", [sample.get("client_mb") for sample in last], linestyle=":")
    for name in ("descriptors", "threads", "documents"):
        line(held, name, [sample.get(name) for sample in last])
    for name, part in (("ttft", 0.5), ("ttft", 0.99), ("livez", 0.99), ("metrics", 0.99)):
        line(waits, f"{name}, p{part * 100:.0f}", [merged(group, name).at(part) for group in groups])
    sums = [totals(group) for group in groups]
    for name in ("right", "wrong", "left"):
        line(answers, name, [float(each.get(name, 0)) for each in sums])
    line(answers, "refused", [float(sum(n for name, n in each.items() if name.startswith("refused"))) for each in sums])
    line(answers, "faults", [float(sum(n for name, n in each.items() if name.startswith("fault"))) for each in sums])
    for name in ("request held", "chunk_cache held", "chunk_cache idle", "chunk_cache free"):
        line(blocks, name, [sample.get("blocks", {}).get(name) for sample in last])
    for tier in sorted({name for sample in last for name in sample.get("tiers", {})}):
        line(tiers, f"{tier}, MB", [_of_tier(sample, tier, "bytes", 1e6) for sample in last])
        line(tiers, f"{tier}, failures", [_of_tier(sample, tier, "failures") for sample in last], linestyle="--")
        line(tiers, f"{tier}, put aside", [_of_tier(sample, tier, "quarantined") for sample in last], linestyle=":")
    titles = ("memory, MB", "held", "latency, s", "answers between two points", "blocks", "tiers")
    for axis, title in zip((memory, held, waits, answers, blocks, tiers), titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("hours of load", fontsize=8)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
        for begin in _begins(groups, hours)[1:]:
            axis.axvline(begin, color="black", linewidth=0.6, linestyle=":")
    waits.set_yscale("log")
    memory.set_ylim(bottom=0)
    held.set_ylim(bottom=0)
    figure.savefig(path, dpi=120)


def _grouped(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Neighbours together where there are more than can be seen; parts stay apart."""
    size = len(samples) // DRAWN_POINTS + 1
    groups: list[list[Sample]] = []
    for sample in samples:
        if not groups or len(groups[-1]) >= size or groups[-1][-1]["part"] != sample["part"]:
            groups.append([])
        groups[-1].append(sample)
    return groups


def _hours(groups: Sequence[Sequence[Sample]]) -> list[float]:
    """Hours of load of all parts until then."""
    hours, before, last = [], 0.0, 0.0
    for index, group in enumerate(groups):
        if index and group[0]["part"] != groups[index - 1][-1]["part"]:
            before += last
        last = group[-1]["elapsed"]
        hours.append((before + last) / 3600)
    return hours


def _begins(groups: Sequence[Sequence[Sample]], hours: Sequence[float]) -> list[float]:
    """Where parts begin."""
    parts: dict[int, float] = {}
    for group, hour in zip(groups, hours, strict=True):
        parts.setdefault(group[0]["part"], hour)
    return list(parts.values())


def _of_tier(sample: Sample, tier: str, what: str, unit: float = 1.0) -> float | None:
    value = sample.get("tiers", {}).get(tier, {}).get(what)
    return None if value is None else value / unit
