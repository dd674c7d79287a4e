"""Counters between two steps, as plain data: vLLM's scheduler, its workers and its /metrics are several processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmosaic.metrics.family import Family, family_named
from kvmosaic.metrics.own_names import (
    ACTIONS,
    CHUNK_HITS,
    CHUNK_LOADED_TOKENS,
    CHUNK_LOADS,
    CHUNK_LOOKUPS,
    CHUNK_MISSES,
    CHUNK_TOKENS,
    REPAIRED_TOKENS,
    TIER_COUNTERS,
    TIER_OUTCOMES,
)
from kvmosaic.vllm.report import ComposedReport

MAX_REASONS = 32
OTHER = "other"
"""The label of all further reasons, which bounds their number."""


COMPOSED = family_named("kvmosaic:composed_requests")
BYPASSED = family_named("kvmosaic:bypassed_requests")
CHUNK_WAITS = family_named("kvmosaic:chunk_waits")
CHUNK_PROMPTS = family_named("kvmosaic:chunk_prompts")
CHUNK_PROMPTS_RUNNING = family_named("kvmosaic:chunk_prompts_running")
MOVED_TOKENS = family_named("kvmosaic:moved_tokens")
MOVE_SECONDS = family_named("kvmosaic:move_seconds")
POOLED = {name: family_named(f"kvmosaic:{name}") for name in ("pooled_documents", "pooled_blocks", "pinned_documents")}
POOL_EVICTIONS = family_named("kvmosaic:document_evictions")

FAMILIES = (
    *(COMPOSED, BYPASSED, CHUNK_LOOKUPS, CHUNK_HITS, CHUNK_MISSES, CHUNK_TOKENS, CHUNK_WAITS),
    *(CHUNK_PROMPTS, CHUNK_PROMPTS_RUNNING, CHUNK_LOADS, CHUNK_LOADED_TOKENS),
    *(MOVED_TOKENS, MOVE_SECONDS, REPAIRED_TOKENS),
    *(*POOLED.values(), POOL_EVICTIONS),
    *TIER_COUNTERS,
    *TIER_OUTCOMES,
)
BY_NAME = {family.name: family for family in FAMILIES}
LABEL_VALUES = {CHUNK_TOKENS: ACTIONS}
"""Label values that are exported from the start, at zero."""

Counts = dict[str, dict[str, float]]
"""By name of a family, and by label value ("" if it has none)."""


class ReportCounters:
    """Counters until they are taken.

        tally.composed(report); tally.moved(2048, 0.06)
        tally.take()    {"counts": {"kvmosaic:moved_tokens": {"": 2048}, ...}}

    Counting is always safe and never raises.
    """

    def __init__(self) -> None:
        self._counts: Counts = {}
        self._reasons: set[str] = set()
        self._num_running = 0
        self._pooled: tuple[int, ...] = (0,) * len(POOLED)

    def composed(self, report: ComposedReport) -> None:
        """Counts a composed request."""
        self._add(COMPOSED, 1)
        for row in report.to_json()["documents"]:
            self._add(CHUNK_TOKENS, row["tokens"] - row["reused_tokens"], "computed")
            self._add(CHUNK_TOKENS, row["reused_tokens"], "moved" if row["distance"] else "reused")
        num_chunks = len(report.chunks)
        num_computed = sum(chunk.source == "computed" for chunk in report.chunks)
        self._add(CHUNK_LOOKUPS, num_chunks)
        self._add(CHUNK_MISSES, num_computed)
        self._add(CHUNK_HITS, num_chunks - num_computed)
        self._add(CHUNK_WAITS, sum(chunk.source == "awaited" for chunk in report.chunks))
        self._add(REPAIRED_TOKENS, report.repaired_tokens, "computed")
        for chunk, length in zip(report.chunks, report.lengths, strict=True):
            if chunk.source == "cached" and chunk.tier != "device":
                self._add(CHUNK_LOADS, 1)
                self._add(CHUNK_LOADED_TOKENS, length)

    def bypassed(self, code: str) -> None:
        """Counts a request with documents that is answered as an ordinary prompt; `code` is the reason in one word."""
        if code not in self._reasons:
            if len(self._reasons) < MAX_REASONS:
                self._reasons.add(code)
            else:
                code = OTHER
        self._add(BYPASSED, 1, code)

    def chunk_prompts(self, num_started: int, num_running: int) -> None:
        """Records started and running internal requests; called after every step."""
        self._add(CHUNK_PROMPTS, num_started)
        if num_running != self._num_running:
            self._num_running = num_running
            self._counts[CHUNK_PROMPTS_RUNNING.name] = {"": num_running}

    def pooled(self, num_documents: int, num_blocks: int, num_pinned: int, num_evicted: int) -> None:
        """Records the content of the document pool, and how many documents left it since the last call."""
        now = (num_documents, num_blocks, num_pinned)
        for family, number, before in zip(POOLED.values(), now, self._pooled, strict=True):
            if number != before:
                self._counts[family.name] = {"": number}
        self._pooled = now
        self._add(POOL_EVICTIONS, num_evicted)

    def moved(self, num_tokens: int, seconds: float = 0.0) -> None:
        """Counts moved tokens and a worker's seconds; the scheduler counts tokens once, each worker its seconds."""
        self._add(MOVED_TOKENS, num_tokens)
        self._add(MOVE_SECONDS, seconds)

    def counted(self, family: Family, number: float, label: str = "") -> None:
        """Adds a count from elsewhere."""
        self._add(family, number, label)

    def take(self) -> dict[str, Any] | None:
        """Counts since the last call; None if there are none."""
        if not self._counts:
            return None
        taken, self._counts = {"counts": self._counts}, {}
        return taken

    def _add(self, family: Family, number: float, label: str = "") -> None:
        if number:
            values = self._counts.setdefault(family.name, {})
            values[label] = values.get(label, 0) + number


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two: counters add up, and a gauge takes the later value."""
    counts: Counts = {name: dict(values) for name, values in first.get("counts", {}).items()}
    for name, values in second.get("counts", {}).items():
        into = counts.setdefault(name, {})
        for label, number in values.items():
            into[label] = number if _is_gauge(name) else into.get(label, 0) + number
    return {"counts": counts}


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """One number for each count, for a log line."""
    numbers: dict[str, int | float] = {}
    for name, values in data.get("counts", {}).items():
        for label, number in values.items():
            short = name.removeprefix("kvmosaic:")
            numbers[f"{short}[{label}]" if label else short] = round(number, 3)
    return numbers


def _is_gauge(name: str) -> bool:
    family = BY_NAME.get(name)
    return family is not None and family.kind == "gauge"
