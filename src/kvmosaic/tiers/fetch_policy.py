"""FetchPolicy: which tiers are worth asking for a chunk, and with which timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvmosaic.tiers.cost import LoadCost
from kvmosaic.tiers.tier import Tier

FIRST_TIMEOUT_SECONDS = 0.15
"""Wait limit on top of the expected load time, and the maximum that a slow or hanging tier adds to a request whose
chunks are computed faster than this; a request with more to compute waits at most as long as computing takes."""
ALWAYS_PATIENCE_SECONDS = 5.0
"""Wait limit where chunks are always loaded, independent of their compute time."""
SLOWEST_BYTES_PER_SECOND = 100e6
"""Assumed minimum bandwidth of a tier without measurements; a slower one times out."""
LOOK_SECONDS = 4.0
"""Probe interval of a tier that was too slow; probes run without a waiting request."""
_LOOK_SHARE = 20
"""Minimum ratio of the probe interval to a probe's CPU time, which it takes from computing threads."""
_MAX_LOOK_SECONDS = 60.0
"""Maximum probe interval, however much CPU time a probe takes."""


Loading = Literal["auto", "always"]
"""Whether chunks are loaded from tiers where that is faster than computing them, or wherever tiers have them."""


@dataclass(slots=True)
class _Record:
    """Measurements of one tier."""

    cost: LoadCost = field(default_factory=LoadCost)
    next_look: float = 0.0


class FetchPolicy:
    """Fetch policy: compares the measured cost of asking each tier with that of computing.

        worth asking ──slow, or only misses──▶ not worth asking ──a periodic probe was fast──▶ worth asking

    A probe asks for a chunk that is being computed meanwhile, so it costs no request anything but a little CPU time.
    A probe that hits drops the earlier, outdated measurements. All methods are thread-safe.
    """

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float], loading: Loading = "auto") -> None:
        """Starts without measurements, so that all tiers are worth asking; with "always" they stay so."""
        self._clock = clock
        self._loads_always = loading == "always"
        self._lock = threading.Lock()
        self._records = {id(tier): _Record(next_look=clock() + LOOK_SECONDS) for tier in tiers}

    def bytes_per_second(self, tier: Tier) -> float | None:
        """Measured when loading, verifying and decoding included; None before the first hit."""
        return self._records[id(tier)].cost.bytes_per_second

    def is_worth(self, tier: Tier, num_bytes: int, compute_seconds: float | None) -> bool:
        """Whether asking a tier is expected to be faster than computing."""
        with self._lock:
            return self._loads_always or self._records[id(tier)].cost.is_worth(num_bytes, compute_seconds)

    def timeout(self, tiers: Sequence[Tier], num_bytes: int, compute_seconds: float | None) -> float:
        """Seconds to wait for a chunk from these tiers, asked one after the other."""
        with self._lock:
            costs = [self._records[id(tier)].cost for tier in tiers]
            estimates = [cost.estimate(num_bytes) for cost in costs]
            unknown = num_bytes / SLOWEST_BYTES_PER_SECOND
            expected = sum(
                cost.miss_seconds + unknown if estimate is None else estimate
                for cost, estimate in zip(costs, estimates, strict=True)
            )
        if self._loads_always:
            return ALWAYS_PATIENCE_SECONDS + expected
        patience = FIRST_TIMEOUT_SECONDS + expected
        return patience if compute_seconds is None else min(patience, max(FIRST_TIMEOUT_SECONDS, compute_seconds))

    def longest_wait(self, num_bytes: int, compute_seconds: float | None) -> float:
        """Seconds to wait for all chunks of a request together: their compute time, if that is not very short."""
        unknown = num_bytes / SLOWEST_BYTES_PER_SECOND
        if self._loads_always:
            return ALWAYS_PATIENCE_SECONDS + max(unknown, compute_seconds or 0.0)
        if compute_seconds is None:
            return FIRST_TIMEOUT_SECONDS + unknown
        return max(FIRST_TIMEOUT_SECONDS, compute_seconds)

    def take_probe_slot(self, tier: Tier) -> bool:
        """Takes the probe slot of a tier that is not worth asking; if True, the caller must probe it now."""
        with self._lock:
            record, now = self._records[id(tier)], self._clock()
            if now < record.next_look:
                return False
            record.next_look = now + LOOK_SECONDS
            return True

    def note_hit(
        self, tier: Tier, num_bytes: int, seconds: float, busy_seconds: float, *, is_look: bool = False
    ) -> None:
        """Records a verified and decoded entry of a tier; `busy_seconds` of that was CPU time."""
        with self._lock:
            record = self._records[id(tier)]
            if is_look:
                record.cost.forget_times()
            record.cost.note_hit(num_bytes, seconds)
            self._put_off(record, busy_seconds)

    def note_miss(self, tier: Tier, seconds: float, busy_seconds: float) -> None:
        """Records a miss."""
        with self._lock:
            record = self._records[id(tier)]
            record.cost.note_miss(seconds)
            self._put_off(record, busy_seconds)

    def _put_off(self, record: _Record, busy_seconds: float) -> None:
        """Postpones the next probe after a measurement."""
        pause = min(max(LOOK_SECONDS, _LOOK_SHARE * busy_seconds), _MAX_LOOK_SECONDS)
        record.next_look = max(record.next_look, self._clock() + pause)
