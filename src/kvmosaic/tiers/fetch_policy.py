"""FetchPolicy: which tiers are worth asking for a chunk, and how long it is worth waiting for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvmosaic.tiers.cost import LoadCost
from kvmosaic.tiers.tier import Tier

FIRST_TIMEOUT_SECONDS = 0.15
"""To wait for a tier beyond what loading is expected to take: what a tier that hangs costs a request at most."""
ALWAYS_PATIENCE_SECONDS = 5.0
"""The same where chunks are always loaded, however long computing them would take."""
SLOWEST_BYTES_PER_SECOND = 100e6
"""Of a tier that nothing is known of yet; it is given up when it is slower."""
LOOK_SECONDS = 4.0
"""So often a tier that was too slow is measured again, with nobody waiting."""
_LOOK_SHARE = 20
"""A look may use a processor for this part of the time between two of them: it takes it from those who compute."""
_MOST_LOOK_SECONDS = 60.0
"""So often a tier is measured again, however much work that was."""


Loading = Literal["auto", "always"]
"""Whether chunks are loaded from tiers where that is faster than computing them, or wherever tiers have them."""


@dataclass(slots=True)
class _Record:
    """What is known of one tier."""

    cost: LoadCost = field(default_factory=LoadCost)
    next_look: float = 0.0


class FetchPolicy:
    """Remembers what asking each tier took, and weighs it against computing.

        worth asking ──is slow, or has nothing──▶ not worth asking ──a look, now and then, was fast──▶ worth asking

    A look asks for a chunk that is being computed meanwhile, so it costs nobody anything but a little processor time.
    If it finds one, the times that were known before are forgotten: they are old. All methods are safe on any thread.
    """

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float], loading: Loading = "auto") -> None:
        """Knows nothing of the tiers yet, so that all of them are worth asking; with "always" they stay so."""
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
        """Seconds to wait for a chunk that these tiers are asked for, one after the other."""
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
        return FIRST_TIMEOUT_SECONDS + (expected if compute_seconds is None else min(expected, compute_seconds))

    def longest_wait(self, num_bytes: int, compute_seconds: float | None) -> float:
        """Seconds to wait for all chunks of a request together: as long as computing them takes."""
        unknown = num_bytes / SLOWEST_BYTES_PER_SECOND
        if self._loads_always:
            return ALWAYS_PATIENCE_SECONDS + max(unknown, compute_seconds or 0.0)
        return FIRST_TIMEOUT_SECONDS + (unknown if compute_seconds is None else compute_seconds)

    def is_look_due(self, tier: Tier) -> bool:
        """Whether a tier that is not worth asking should be looked at now; if so, the caller does it."""
        with self._lock:
            record, now = self._records[id(tier)], self._clock()
            if now < record.next_look:
                return False
            record.next_look = now + LOOK_SECONDS
            return True

    def note_hit(
        self, tier: Tier, num_bytes: int, seconds: float, busy_seconds: float, *, is_look: bool = False
    ) -> None:
        """A tier gave an entry, which was verified and decoded; the processor was busy with it for a part of that."""
        with self._lock:
            record = self._records[id(tier)]
            if is_look:
                record.cost.forget_times()
            record.cost.note_hit(num_bytes, seconds)
            self._put_off(record, busy_seconds)

    def note_miss(self, tier: Tier, seconds: float, busy_seconds: float) -> None:
        """A tier has no such entry."""
        with self._lock:
            record = self._records[id(tier)]
            record.cost.note_miss(seconds)
            self._put_off(record, busy_seconds)

    def _put_off(self, record: _Record, busy_seconds: float) -> None:
        """What was just measured need not be looked at soon."""
        pause = min(max(LOOK_SECONDS, _LOOK_SHARE * busy_seconds), _MOST_LOOK_SECONDS)
        record.next_look = max(record.next_look, self._clock() + pause)
