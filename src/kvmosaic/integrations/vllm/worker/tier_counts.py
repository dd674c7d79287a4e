"""Tier counters of one worker, as counts for vLLM's /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kvmosaic.integrations.vllm.report_counters import ReportCounters
from kvmosaic.metrics.family import Family
from kvmosaic.metrics.own_names import TIER_COUNTERS, TIER_OUTCOMES
from kvmosaic.tiers import TieredStore

_EVERY_SECONDS = 1.0


class TierCounts:
    """Adds the growth of a tiered store's counters to a tally."""

    def __init__(self, tiered_store: TieredStore[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._tiered_store, self._clock = tiered_store, clock
        self._before: dict[tuple[Family, str], float] = {}
        self._next = 0.0

    def add_to(self, tally: ReportCounters) -> None:
        """Adds the growth since the last call; at most once a second, since every step calls it."""
        if self._clock() < self._next:
            return
        self._next = self._clock() + _EVERY_SECONDS
        now: dict[tuple[Family, str], float] = {}
        for stat in self._tiered_store.tier_stats():
            for family, name in TIER_COUNTERS.items():
                now[family, stat.name] = now.get((family, stat.name), 0) + getattr(stat, name)
        for family, outcomes in TIER_OUTCOMES.items():
            now |= {(family, outcome): getattr(self._tiered_store.stats, outcome) for outcome in outcomes}
        for (family, label), number in now.items():
            tally.counted(family, number - self._before.get((family, label), 0), label)
        self._before = now
