"""Circuit breaker of a tier: fails calls fast while the tier fails, and probes it in the background."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidConfig, InvalidEntry, TierError, TierFull, TierUnavailable
from kvmosaic.tiers.notices import Notices
from kvmosaic.tiers.tier import Deadline, Entry, EntryInfo, Tier, TierStat

logger = logging.getLogger("kvmosaic")

_T = TypeVar("_T")
__all__ = ["MAX_FAILURES", "MAX_SECONDS", "Breaker", "BreakerStat", "BreakerState"]
MAX_FAILURES = 1000
MAX_SECONDS = 3600.0
_PROBED = Key(bytes(32))


class BreakerState(StrEnum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    """The tier works; calls go through."""
    OPEN = "open"
    """The tier failed; calls fail fast."""
    HALF_OPEN = "half-open"
    """The tier failed and is being probed; other calls fail fast."""


@dataclass(frozen=True, slots=True)
class BreakerStat:
    """A snapshot of a breaker. Counters run since it was made."""

    state: BreakerState
    opened: int
    """Times that a circuit opened."""
    skipped: int
    """Calls that failed fast, without reaching the tier."""
    probes: int
    failed_probes: int
    reason: str
    """Reason of the last opening; empty if there was none."""


@dataclass(frozen=True, slots=True)
class Pace:
    """When a circuit opens, and how often it probes; see `Breaker`."""

    failures: int
    interval_seconds: float
    jitter: float
    probe_seconds: float
    slow_seconds: float
    clock: Callable[[], float]
    in_background: bool


class Circuit:
    """The read or the write circuit of a tier.

                        `failures` calls in a row fail
              CLOSED ──────────────────────────────────────▶ OPEN ◀──┐
            calls the tier                            TierUnavailable │ the probe fails
                 ▲                                        fails fast  │
                 │        the probe succeeds                │ every `interval_seconds`
                 └──────────────────────── HALF_OPEN ◀──────┘─────────┘

    Logs the failure once, then once a minute with a count, and logs recovery after that.
    """

    def __init__(self, name: str, verb: str, meanwhile: str, probe: Callable[[Deadline], object], pace: Pace) -> None:
        """Starts closed.

        Args:
            name: of the tier.
            verb: "read" or "written", for the log.
            meanwhile: the fallback while it is open, for the log.
            probe: a call of this kind; it raises the tier's errors.
            pace: when it opens, and how often it probes.
        """
        self.state = BreakerState.CLOSED
        self._name = name
        self._verb = verb
        self._meanwhile = meanwhile
        self._ask = probe
        self._pace = pace
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._next_probe = 0.0
        self._failed_in_a_row = 0
        self._opened = self._skipped = self._probes = self._failed_probes = 0
        self._reason = ""
        self._notices = Notices(logger, clock=pace.clock)
        self._is_said = False
        """Whether the last log line reported a failure."""

    @property
    def stat(self) -> BreakerStat:
        """Current state and counters."""
        with self._lock:
            return BreakerStat(self.state, self._opened, self._skipped, self._probes, self._failed_probes, self._reason)

    def close(self) -> None:
        """Stops probing."""
        self._ended.set()

    def guard(self, ask: Callable[[], _T], deadline: Deadline) -> _T:
        """Calls `ask` and returns its result; fails fast with `TierUnavailable` while the circuit is open."""
        if self.state is not BreakerState.CLOSED:
            with self._lock:
                self._skipped += 1
                reason = self._reason
            raise TierUnavailable(
                f"the {self._name} tier is not {self._verb}, because that failed: {reason}; "
                f"it is probed about every {self._pace.interval_seconds:g} s and used again when that works"
            )
        start = self._pace.clock()
        try:
            result = ask()
        except TierUnavailable as error:
            self._count_failure(str(error))
            raise
        except (TierFull, InvalidEntry):
            self._failed_in_a_row = 0
            raise
        seconds = self._pace.clock() - start
        if seconds >= self._pace.slow_seconds and deadline.has_passed:
            self._count_failure(f"it was not done after {seconds:.2f} s")
        else:
            self._failed_in_a_row = 0
        return result

    def probe_if_due(self) -> bool:
        """Probes if the circuit is open and the interval is over; returns whether it is closed now."""
        with self._lock:
            if self.state is not BreakerState.OPEN or self._pace.clock() < self._next_probe:
                return self.state is BreakerState.CLOSED
            self.state = BreakerState.HALF_OPEN
            self._probes += 1
        reason: str | None = None
        try:
            self._ask(Deadline(self._pace.probe_seconds))
        except TierFull:
            pass
        except TierUnavailable as error:
            reason = str(error)
        except Exception as error:  # any error: the circuit must not stay half-open
            logger.exception("probing the %s tier", self._name)
            reason = repr(error)
        with self._lock:
            self._settle(reason)
        return reason is None

    def _settle(self, reason: str | None) -> None:
        if reason is None:
            self.state = BreakerState.CLOSED
            self._failed_in_a_row = 0
            if self._is_said:
                self._is_said = False
                logger.warning("the %s tier can be %s again", self._name, self._verb)
            return
        self.state = BreakerState.OPEN
        self._failed_probes += 1
        self._reason = reason
        self._next_probe = self._pace.clock() + self._pause()
        self._say()

    def _say(self) -> None:
        self._is_said |= self._notices.warn(
            "fails", f"the {self._name} tier cannot be {self._verb}; it {self._meanwhile}: {self._reason}"
        )

    def _count_failure(self, reason: str) -> None:
        with self._lock:
            self._failed_in_a_row += 1
            if self.state is not BreakerState.CLOSED or self._failed_in_a_row < self._pace.failures:
                return
            self.state = BreakerState.OPEN
            self._opened += 1
            self._reason = reason
            self._next_probe = self._pace.clock() + self._pause()
            self._say()
        if self._pace.in_background and not self._ended.is_set():
            try:
                threading.Thread(target=self._probe, name=f"kvmosaic-probe-{self._name}", daemon=True).start()
            except RuntimeError:  # no more threads: it would never be probed
                logger.exception("the %s tier is asked again at once", self._name)
                with self._lock:
                    self.state = BreakerState.CLOSED

    def _probe(self) -> None:
        while not self._ended.wait(max(0.001, self._next_probe - self._pace.clock())):
            if self.probe_if_due():
                return

    def _pause(self) -> float:
        jitter = random.uniform(1 - self._pace.jitter, 1 + self._pace.jitter)  # noqa: S311 (spreads load, guards nothing)
        return self._pace.interval_seconds * jitter


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
