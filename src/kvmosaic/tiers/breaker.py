"""Circuit breaker of a tier: fails calls fast while the tier fails, and probes it in the background."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidConfig, TierError
from kvmosaic.tiers.circuit import BreakerStat, BreakerState, Circuit, Pace
from kvmosaic.tiers.tier import Deadline, Entry, EntryInfo, Tier, TierStat

__all__ = ["MAX_FAILURES", "MAX_SECONDS", "Breaker", "BreakerStat", "BreakerState"]

MAX_FAILURES = 1000
MAX_SECONDS = 3600.0
_PROBED = Key(bytes(32))


class Breaker:
    """A tier that fails fast while the wrapped tier is known to fail.

        get, exists, scan               ──▶ reads: a `Circuit`, probed by `exists` of one key         ──▶ tier
        put, delete, touch, quarantine  ──▶ writes: a `Circuit`, probed by `put` of an empty entry    ──▶ tier

    Both open independently, so that a disk that became read-only, or a Redis that accepts no more writes, is still
    read. A call fails if it raises `TierUnavailable`, or if it took `slow_seconds` or more and its deadline ended it.
    `TierFull` is no failure. The probes run on threads that live while a circuit is open.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        failures: int = 1,
        interval_seconds: float = 1.0,
        jitter: float = 0.2,
        probe_seconds: float = 0.5,
        slow_seconds: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        in_background: bool = True,
    ) -> None:
        """Wraps `tier` and owns it from now on.

        Args:
            tier: the tier that may fail.
            failures: consecutive failures that open a circuit.
            interval_seconds: between two probes.
            jitter: maximum random share by which the interval varies, so that processes do not probe at once.
            probe_seconds: timeout of a probe.
            slow_seconds: the shortest call that counts as failed when its deadline ends it.
            clock: monotonic seconds.
            in_background: probe on threads; otherwise only `probe_if_due` probes.

        Raises:
            InvalidConfig: a number out of its bounds.
        """
        if not 1 <= failures <= MAX_FAILURES:
            raise InvalidConfig(f"a breaker opens after 1 to {MAX_FAILURES} failures, got {failures}")
        for what, seconds in {"interval_seconds": interval_seconds, "probe_seconds": probe_seconds}.items():
            if not 0.0 < seconds <= MAX_SECONDS:
                raise InvalidConfig(f"{what} must be above 0 and at most {MAX_SECONDS:g}, got {seconds}")
        if not 0.0 <= jitter < 1.0:
            raise InvalidConfig(f"jitter must be at least 0 and below 1, got {jitter}")
        self.tier = tier
        pace = Pace(failures, interval_seconds, jitter, probe_seconds, slow_seconds, clock, in_background)
        self._reads = Circuit(tier.name, "read", "is left alone until it answers again", self._try_to_read, pace)
        self._writes = Circuit(tier.name, "written", "is only read until that works again", self._try_to_write, pace)

    @property
    def name(self) -> str:
        """The tier's name."""
        return self.tier.name

    @property
    def is_persistent(self) -> bool:
        """Whether the tier is persistent."""
        return self.tier.is_persistent

    @property
    def is_open(self) -> bool:
        """Whether reads or writes fail fast now."""
        return any(circuit.state is not BreakerState.CLOSED for circuit in (self._reads, self._writes))

    @property
    def read_stat(self) -> BreakerStat:
        """State and counters of the read circuit."""
        return self._reads.stat

    @property
    def write_stat(self) -> BreakerStat:
        """State and counters of the write circuit."""
        return self._writes.stat

    @property
    def breaker_stat(self) -> BreakerStat:
        """Reads and writes together: sums, and the worse state with its reason."""
        reads, writes = self.read_stat, self.write_stat
        severity = (BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN).index
        worse = max((reads, writes), key=lambda stat: (severity(stat.state), bool(stat.reason)))
        return BreakerStat(
            worse.state,
            reads.opened + writes.opened,
            reads.skipped + writes.skipped,
            reads.probes + writes.probes,
            reads.failed_probes + writes.failed_probes,
            worse.reason,
        )

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """See `Tier.put_many`; fails fast with `TierUnavailable` while the circuit is open."""
        return self._writes.guard(lambda: self.tier.put_many(entries, deadline), deadline)

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        """See `Tier.get_many`; fails fast with `TierUnavailable` while the circuit is open."""
        return self._reads.guard(lambda: self.tier.get_many(keys, deadline, max_bytes=max_bytes), deadline)

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.exists_many`; fails fast with `TierUnavailable` while the circuit is open."""
        return self._reads.guard(lambda: self.tier.exists_many(keys, deadline), deadline)

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.delete_many`; fails fast with `TierUnavailable` while the circuit is open."""
        return self._writes.guard(lambda: self.tier.delete_many(keys, deadline), deadline)

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """See `Tier.touch`; fails fast with `TierUnavailable` while the circuit is open."""
        self._writes.guard(lambda: self.tier.touch(keys, deadline), deadline)

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """See `Tier.quarantine`; fails fast with `TierUnavailable` while the circuit is open."""
        self._writes.guard(lambda: self.tier.quarantine(key, reason, deadline), deadline)

    def scan(self, deadline: Deadline) -> Iterator[EntryInfo]:
        """See `Tier.scan`; fails fast while the circuit is open. A slow reader is no failure."""
        infos = self._reads.guard(lambda: self.tier.scan(deadline), Deadline())
        while (info := self._reads.guard(lambda: next(infos, None), Deadline())) is not None:
            yield info

    def stat(self) -> TierStat:
        """See `Tier.stat`; see also `breaker_stat`."""
        return self.tier.stat()

    def close(self) -> None:
        """Stops probing and closes the tier."""
        self._reads.close()
        self._writes.close()
        self.tier.close()

    def probe_if_due(self) -> bool:
        """Probes open circuits if the interval is over; returns whether the tier is read and written now."""
        is_read = self._reads.probe_if_due()
        return self._writes.probe_if_due() and is_read

    def _try_to_read(self, deadline: Deadline) -> None:
        self.tier.exists_many([_PROBED], deadline)

    def _try_to_write(self, deadline: Deadline) -> None:
        self.tier.put_many({_PROBED: b""}, deadline)
        with contextlib.suppress(TierError):
            self.tier.delete_many([_PROBED], deadline)
