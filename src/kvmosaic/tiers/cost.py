"""Cost model: whether loading a chunk is faster than computing it again, from what was measured."""

from __future__ import annotations

import math

_WEIGHT = 0.3
"""Of the newest measurement; the rest is what was known before."""
_RATE_WEIGHT = 0.05
"""The same for hits and misses, which tell little one by one."""
LEAST_HIT_RATE = 0.02
"""Floor for the estimated hit rate: a probe that misses may cost a fiftieth of computing."""
_MARGIN = 0.9
"""Of computing, what loading may take: measurements vary, and being wrong costs more than it could have saved."""
_FIRST_HITS = 4
"""Of a tier, of which the fastest counts: connecting, importing and touching memory make first ones slow."""
_UNSURE_SECONDS = 0.01
"""More than what another machine says that computing takes: so little is not worth leaving a tier for."""
_LEAST_SPREAD = 0.1
"""Sizes of entries must differ so much, by their mean, to tell a latency from a bandwidth."""


class EMA:
    """A mean that forgets: the newest number counts most."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, number: float) -> None:
        """Takes in a measurement."""
        self.value = number if self.value is None else self.value + _WEIGHT * (number - self.value)


class LatencyBandwidthFit:
    """A straight line through points that forgets: seconds = latency + bytes * pace, neither of them negative.

    Points of one size alone do not tell the two apart; then the latency is the least that is known of it.
    """

    def __init__(self) -> None:
        self._x, self._y, self._xx, self._xy = (EMA() for _ in range(4))

    @property
    def is_known(self) -> bool:
        """Whether there is any point."""
        return self._x.value is not None

    def add(self, x: float, y: float) -> None:
        """Takes in a point."""
        for average, number in ((self._x, x), (self._y, y), (self._xx, x * x), (self._xy, x * y)):
            average.add(number)

    def fit(self, least_latency: float) -> tuple[float, float]:
        """Latency and pace; the latency is at least this, unless whole loads take less."""
        x, y, xx, xy = (average.value or 0.0 for average in (self._x, self._y, self._xx, self._xy))
        latency, variance = min(least_latency, y), xx - x * x
        if variance > (_LEAST_SPREAD * x) ** 2:
            pace = (xy - x * y) / variance
            latency = min(max(latency, y - max(pace, 0.0) * x), y)
        return latency, (y - latency) / max(x, 1.0)


class LoadCost:
    """What asking one tier takes: seconds of a hit by its size, seconds of a miss, and how often it is a hit."""

    def __init__(self) -> None:
        self._hits = LatencyBandwidthFit()
        self._num_hits = 0
        self._fastest = math.inf
        self._miss = EMA()
        self.hit_rate = 1.0
        """Of late; a tier that was never asked is believed to have everything."""

    def forget_times(self) -> None:
        """The tier was not asked for long: the next hit tells all that is known of its speed."""
        self._hits, self._miss, self._num_hits = LatencyBandwidthFit(), EMA(), _FIRST_HITS

    @property
    def miss_seconds(self) -> float:
        """What it takes to learn that an entry is not there."""
        return self._miss.value or 0.0

    @property
    def is_sure(self) -> bool:
        """Whether there were enough hits to leave a tier for being slow."""
        return self._num_hits >= _FIRST_HITS

    @property
    def bytes_per_second(self) -> float | None:
        """Measured bandwidth, verifying and decoding included; None before the first hit."""
        return 1 / max(self._hits.fit(self.miss_seconds)[1], 1e-15) if self._hits.is_known else None

    def note_miss(self, seconds: float) -> None:
        """An entry was asked for and is not there."""
        self._miss.add(seconds)
        self._count(is_hit=False)

    def note_hit(self, num_bytes: int, seconds: float) -> None:
        """An entry was read, verified and decoded."""
        self._count(is_hit=True)
        self._num_hits += 1
        if self.is_sure:
            self._hits.add(num_bytes, seconds)
        elif (pace := seconds / max(num_bytes, 1)) < self._fastest:
            self._fastest, self._hits = pace, LatencyBandwidthFit()
            self._hits.add(num_bytes, seconds)

    def estimate(self, num_bytes: int) -> float | None:
        """Seconds that an entry of this size takes if it is there; None before the first hit."""
        if not self._hits.is_known:
            return None
        latency, pace = self._hits.fit(self.miss_seconds)
        return latency + num_bytes * pace

    def is_worth(self, num_bytes: int, compute_seconds: float | None) -> bool:
        """Whether asking is expected to save time; what nobody knows is tried.

        A hit saves what computing takes longer than loading, a miss wastes its time. Before there were enough hits,
        they count as fast.
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
    """What computing takes: seconds per token.

    Chunks that are computed tell it. Where everything is loaded, nothing is computed: then entries tell what computing
    them took elsewhere, and every step how long a token takes here at most.
    """

    def __init__(self) -> None:
        self._measured = EMA()
        self._told: float | None = None
        self._most = math.inf

    def note(self, num_tokens: int, seconds: float) -> None:
        """A chunk was computed."""
        self._measured.add(seconds / max(num_tokens, 1))

    def tell(self, num_tokens: int, seconds: float) -> None:
        """An entry says what computing it took, maybe on another machine; believed until one is computed here."""
        if seconds > 0.0:
            self._told = seconds / max(num_tokens, 1)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Any tokens were computed: chunks, of more tokens, take no longer per token."""
        rate = seconds / max(num_tokens, 1)
        if self._measured.value is not None:
            self._measured.value = min(self._measured.value, rate)
        self._most = min(self._most, rate)

    def estimate(self, num_tokens: int) -> float | None:
        """Seconds that so many tokens will take; None if nobody knows."""
        if self._measured.value is not None:
            return num_tokens * self._measured.value
        if self._told is not None:
            return num_tokens * min(self._told, self._most) + _UNSURE_SECONDS
        return None
