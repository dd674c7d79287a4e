"""FetchPolicy: which tiers are worth asking for a chunk, by measured costs, and with which timeout."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvmosaic.tiers.tier import Tier

_WEIGHT = 0.3
"""EMA weight of the newest measurement."""
_RATE_WEIGHT = 0.05
"""EMA weight of the newest hit or miss; a single one says little."""
LEAST_HIT_RATE = 0.02
"""Floor for the estimated hit rate: a probe that misses may cost a fiftieth of computing."""
_MARGIN = 0.9
"""Maximum load time, as a share of compute time: measurements vary, and a wrong load costs more than it saves."""
_FIRST_HITS = 4
"""First hits of a tier, of which the fastest counts: connections, imports and page faults slow the first ones."""
_UNSURE_SECONDS = 0.01
"""Compute times reported by another machine that are shorter than this never rule out a tier."""
_LEAST_SPREAD = 0.1
"""Minimum spread of entry sizes, relative to their mean, for separating latency from bandwidth."""


class EMA:
    """Exponential moving average: the newest number has the largest weight."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, number: float) -> None:
        """Adds a measurement."""
        self.value = number if self.value is None else self.value + _WEIGHT * (number - self.value)


class LatencyBandwidthFit:
    """Exponentially weighted line fit: seconds = latency + bytes * pace, neither of them negative.

    Points of one size alone do not separate the two; then the lowest known latency is used.
    """

    def __init__(self) -> None:
        self._x, self._y, self._xx, self._xy = (EMA() for _ in range(4))

    @property
    def is_known(self) -> bool:
        """Whether there are any points."""
        return self._x.value is not None

    def add(self, x: float, y: float) -> None:
        """Adds a point."""
        for average, number in ((self._x, x), (self._y, y), (self._xx, x * x), (self._xy, x * y)):
            average.add(number)

    def fit(self, least_latency: float) -> tuple[float, float]:
        """Latency and pace; the latency is at least `least_latency`, unless whole loads take less."""
        x, y, xx, xy = (average.value or 0.0 for average in (self._x, self._y, self._xx, self._xy))
        latency, variance = min(least_latency, y), xx - x * x
        if variance > (_LEAST_SPREAD * x) ** 2:
            pace = (xy - x * y) / variance
            latency = min(max(latency, y - max(pace, 0.0) * x), y)
        return latency, (y - latency) / max(x, 1.0)


class LoadCost:
    """Cost of asking one tier: seconds of a hit by size, seconds of a miss, and hit rate."""

    def __init__(self) -> None:
        self._hits = LatencyBandwidthFit()
        self._num_hits = 0
        self._fastest = math.inf
        self._miss = EMA()
        self.hit_rate = 1.0
        """Moving average; starts at 1, so that a new tier is tried."""

    def forget_times(self) -> None:
        """Drops old measurements of a tier not asked for long: the next hit alone determines its speed."""
        self._hits, self._miss, self._num_hits = LatencyBandwidthFit(), EMA(), _FIRST_HITS

    @property
    def miss_seconds(self) -> float:
        """Seconds of a miss."""
        return self._miss.value or 0.0

    @property
    def is_sure(self) -> bool:
        """Whether there were enough hits to skip a tier as slow."""
        return self._num_hits >= _FIRST_HITS

    @property
    def bytes_per_second(self) -> float | None:
        """Measured bandwidth, verifying and decoding included; None before the first hit."""
        return 1 / max(self._hits.fit(self.miss_seconds)[1], 1e-15) if self._hits.is_known else None

    def note_miss(self, seconds: float) -> None:
        """Records a miss."""
        self._miss.add(seconds)
        self._count(is_hit=False)

    def note_hit(self, num_bytes: int, seconds: float) -> None:
        """Records an entry that was read, verified and decoded."""
        self._count(is_hit=True)
        self._num_hits += 1
        if self.is_sure:
            self._hits.add(num_bytes, seconds)
        elif (pace := seconds / max(num_bytes, 1)) < self._fastest:
            self._fastest, self._hits = pace, LatencyBandwidthFit()
            self._hits.add(num_bytes, seconds)

    def estimate(self, num_bytes: int) -> float | None:
        """Expected seconds to load an entry of this size; None before the first hit."""
        if not self._hits.is_known:
            return None
        latency, pace = self._hits.fit(self.miss_seconds)
        return latency + num_bytes * pace

    def is_worth(self, num_bytes: int, compute_seconds: float | None) -> bool:
        """Whether asking is expected to save time; True if unknown.

        A hit saves the compute time minus the load time, a miss wastes its time. Before there were enough hits, hits
        count as fast.
        """
        if compute_seconds is None:
            return True
        hit_seconds = self.estimate(num_bytes) if self.is_sure else None
        hit_seconds = self.miss_seconds if hit_seconds is None else hit_seconds
        rate = max(self.hit_rate, LEAST_HIT_RATE)
        return (1 - rate) * self.miss_seconds < rate * (_MARGIN * compute_seconds - hit_seconds)

    def _count(self, *, is_hit: bool) -> None:
        self.hit_rate += _RATE_WEIGHT * (is_hit - self.hit_rate)


class ComputeCost:
    """Moving average of compute time: seconds per token.

    Measured when chunks are computed. Where everything is loaded and nothing is computed, entries report their compute
    time elsewhere, and every step gives an upper bound for the seconds per token here.
    """

    def __init__(self) -> None:
        self._measured = EMA()
        self._told: float | None = None
        self._most = math.inf

    def note(self, num_tokens: int, seconds: float) -> None:
        """Records a computed chunk."""
        self._measured.add(seconds / max(num_tokens, 1))

    def tell(self, num_tokens: int, seconds: float) -> None:
        """Records an entry's reported compute time, maybe of another machine; used until a chunk is computed here."""
        if seconds > 0.0:
            self._told = seconds / max(num_tokens, 1)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Records a step of any tokens: chunks, of more tokens, take no longer per token."""
        rate = seconds / max(num_tokens, 1)
        if self._measured.value is not None:
            self._measured.value = min(self._measured.value, rate)
        self._most = min(self._most, rate)

    def estimate(self, num_tokens: int) -> float | None:
        """Expected seconds for so many tokens; None if unknown."""
        if self._measured.value is not None:
            return num_tokens * self._measured.value
        if self._told is not None:
            return num_tokens * min(self._told, self._most) + _UNSURE_SECONDS
        return None


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
