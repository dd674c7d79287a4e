"""Whether a soak passed, from its samples alone: growth told from noise, and one line for each thing that must hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from soak_seen import merged

Sample = dict[str, Any]
NUM_BLOCKS = 12
FLOOR = 0.2
"""The floor of a block of time: a fifth of its samples are lower. Peaks, which an attack may cause, are above it."""
TOO_SHORT = "too short to judge"
LEAST_SECONDS = 900.0
"""Growth is not judged where the second half of a part is shorter."""


@dataclass(frozen=True)
class Bound:
    """How fast something may grow for ever, and how much of a rise is no matter."""

    name: str
    per_hour: float
    least_rise: float


BOUNDS = (
    Bound("anonymous_mb", 5.0, 12.0),
    Bound("rss_mb", 5.0, 12.0),
    Bound("descriptors", 1.0, 6.0),
    Bound("threads", 0.5, 4.0),
    Bound("documents", 10.0, 60.0),
)


@dataclass(frozen=True)
class Growth:
    """What grew by how much in an hour, over the second half of a part; `low` and `high` hold it with 95 %."""

    name: str
    part: int
    hours: float
    slope: float
    low: float
    high: float
    is_judged: bool
    is_too_fast: bool


def growth_of(part: int, points: Sequence[tuple[float, float]], bound: Bound) -> Growth:
    """The slope of the floors of up to twelve blocks of time (Theil-Sen), with Sen's interval.

    The median of the slopes between all pairs of floors: a few odd blocks change nothing. It is too fast if even the
    lower end of its interval is above the bound, and if it has added up to more than what is no matter.
    """
    points = [(at, value) for at, value in points if at >= points[-1][0] / 2] if points else []
    if len(points) < 6:
        return Growth(bound.name, part, 0.0, 0.0, -math.inf, math.inf, False, False)
    first, last = points[0][0], points[-1][0]
    floors = _floors(points, min(NUM_BLOCKS, len(points) // 2))
    slopes = sorted((after - before) / (later - at) * 3600 for (at, before), (later, after) in combinations(floors, 2))
    spread = 1.96 * math.sqrt(len(floors) * (len(floors) - 1) * (2 * len(floors) + 5) / 18)
    low = slopes[max(0, math.floor((len(slopes) - spread) / 2))]
    high = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + spread) / 2))]
    slope, hours = statistics.median(slopes), (last - first) / 3600
    is_judged = last - first >= LEAST_SECONDS
    is_too_fast = is_judged and low > bound.per_hour and slope * hours > bound.least_rise
    return Growth(bound.name, part, hours, slope, low, high, is_judged, is_too_fast)


def _floors(points: Sequence[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """Middle of time and floor of so many blocks with equally many samples."""
    size = len(points) / count
    blocks = [points[round(number * size) : round((number + 1) * size)] for number in range(count)]
    return [
        (statistics.fmean(at for at, _ in block), sorted(value for _, value in block)[int(FLOOR * len(block))])
        for block in blocks
        if block
    ]


@dataclass(frozen=True)
class Check:
    """One thing that must hold."""

    name: str
    holds: bool
    found: str


def growths(samples: Sequence[Sample]) -> list[Growth]:
    """Everything that must not grow, in each part."""
    return [
        growth_of(
            part,
            [(each["elapsed"], each[bound.name]) for each in samples if each["part"] == part and bound.name in each],
            bound,
        )
        for bound in BOUNDS
        for part in sorted({sample["part"] for sample in samples})
    ]


def checks(
    samples: Sequence[Sample], ends: Sequence[dict[str, Any]], faults: Sequence[dict[str, Any]], livez_seconds: float
) -> list[Check]:
    """What must hold, in the order in which one wants to know it. `ends` are the records of how parts ended."""
    counts = totals(samples)
    found = [
        _never("a wrong answer", counts.get("wrong", 0), f", beside {counts.get('right', 0):,} right ones"),
        Check("answers were compared", counts.get("right", 0) > 0, f"{counts.get('right', 0):,}"),
    ]
    kinds = {fault["kind"] for fault in faults} | {"5xx", "no reply"}
    for kind in sorted(kinds - {"a wrong answer"}):
        number = max(counts.get(f"fault: {kind}", 0), sum(fault["kind"] == kind for fault in faults))
        found.append(_never(kind, number))
    odd = [end["how"] for end in ends if not end["is_well"]]
    found.append(Check("the server lived, and ended after SIGTERM", not odd, "; ".join(odd) or f"{len(ends)} times"))
    for name in ("livez", "metrics"):
        worst = merged(samples, name).at(0.99)
        shown = "never asked" if worst is None else f"{worst:.3f} s, at most {livez_seconds:g} s"
        found.append(Check(f"/{name} p99", worst is not None and worst <= livez_seconds, shown))
    all_growths = growths(samples)
    for bound in BOUNDS:
        judged = [growth for growth in all_growths if growth.name == bound.name and growth.is_judged]
        worst_one = max(judged, key=lambda growth: growth.low, default=None)
        shown = f"{TOO_SHORT}: the second half of a part must have a quarter of an hour"
        if worst_one is not None:
            interval = f"{worst_one.low:+.2f} to {worst_one.high:+.2f}"
            shown = f"{worst_one.slope:+.2f} an hour ({interval}), at most {bound.per_hour:g}"
        found.append(Check(f"{bound.name} does not grow", not any(each.is_too_fast for each in judged), shown))
    return found


def verdict(found: Sequence[Check]) -> str:
    """In a word, or a few where not all could be looked at."""
    if not all(check.holds for check in found):
        return "FAIL"
    return "PASS, but too short to judge growth" if any(TOO_SHORT in check.found for check in found) else "PASS"


def totals(samples: Sequence[Sample]) -> dict[str, int]:
    """All counts together, sorted by name."""
    together: dict[str, int] = {}
    for sample in samples:
        for name, number in sample["counts"].items():
            together[name] = together.get(name, 0) + number
    return dict(sorted(together.items()))


def _never(what: str, number: int, beside: str = "") -> Check:
    return Check(f"never: {what}", not number, f"{number}{beside}")
