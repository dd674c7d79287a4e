"""What a soak has seen: counts, latencies and faults, in memory that does not grow, and on disk as they happen."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

STEP = 1.05
"""Latencies are counted in steps of 5 %, from 0.1 ms."""
LEAST = 1e-4
MAX_FAULTS = 500
MAX_QUOTED = 600


class Latencies:
    """Times by steps: as many numbers as there are steps, however many times there were."""

    def __init__(self, counts: Mapping[Any, int] | None = None) -> None:
        self.counts = Counter({int(step): number for step, number in (counts or {}).items()})

    def add(self, seconds: float) -> None:
        self.counts[max(0, math.ceil(math.log(max(seconds, LEAST) / LEAST, STEP)))] += 1

    def merge(self, other: Latencies) -> None:
        self.counts.update(other.counts)

    def at(self, part: float) -> float | None:
        """The time within which this part of them was; None if there are none."""
        left = math.ceil(part * self.counts.total())
        for step in sorted(self.counts):
            left -= self.counts[step]
            if left <= 0:
                return LEAST * STEP**step
        return None


class Seen:
    """What the clients saw since the last sample, and every fault since the beginning.

    A fault is what must never happen: a wrong answer, a failure of the server's own, no reply, a promise broken. Each
    is a line of `faults.jsonl` in the folder of the soak, the first 500 of a part.
    """

    def __init__(self, folder: Path, part: int) -> None:
        self._path = folder / "faults.jsonl"
        self._part = part
        self.counts: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        self.latencies: dict[str, Latencies] = {}
        self.num_faults = 0

    def count(self, what: str, number: int = 1) -> None:
        self.counts[what] += number
        self.totals[what] += number

    def took(self, what: str, seconds: float) -> None:
        self.latencies.setdefault(what, Latencies()).add(seconds)

    def fault(self, kind: str, **about: Any) -> None:
        """Notes what must not happen."""
        self.count(f"fault: {kind}")
        self.num_faults += 1
        if self.num_faults <= MAX_FAULTS:
            quoted = {name: str(value)[:MAX_QUOTED] for name, value in about.items()}
            append(self._path, {"part": self._part, "at": round(time.time(), 1), "kind": kind, **quoted})

    def taken(self) -> dict[str, Any]:
        """Counts and latencies since the last call, as a part of a sample."""
        sample = {
            "counts": dict(self.counts),
            "latencies": {name: dict(sorted(seen.counts.items())) for name, seen in self.latencies.items()},
        }
        self.counts.clear()
        self.latencies.clear()
        return sample


def append(path: Path, record: Mapping[str, Any]) -> None:
    """One more line, whole even if the process is killed right after; half a line of a killed one stays alone."""
    with path.open("ab+") as file:
        file.seek(max(0, file.seek(0, 2) - 1))
        begin = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(begin + json.dumps(record).encode() + b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All lines that are whole: the last one may be half written."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def merged(samples: Iterable[Mapping[str, Any]], name: str) -> Latencies:
    """One latency over many samples."""
    together = Latencies()
    for sample in samples:
        together.merge(Latencies(sample["latencies"].get(name)))
    return together
