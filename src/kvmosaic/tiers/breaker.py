"""Circuit breaker of a tier: fails calls fast while the tier fails, and probes it in the background; peeks past it."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol, TypeVar, runtime_checkable

from kvmosaic.cache.keys import Key
from kvmosaic.errors import TierError, TierFull, TierUnavailable
from kvmosaic.tiers.notices import Notices
from kvmosaic.tiers.tier import MAX_ENTRY_BYTES, Deadline, Entry, EntryInfo, Tier, TierStat

logger = logging.getLogger("kvmosaic")

_T = TypeVar("_T")
PROBE_SECONDS = 0.5
SLOW_SECONDS = 0.1
"""The shortest call that counts as failed when its deadline ends it."""
_PROBED = Key(bytes(32))


class BreakerState(StrEnum):
    """State of a circuit: calls go through; the tier failed, and calls fail fast; the same, while it is probed."""

    CLOSED = "closed"
    HALF_OPEN = "half-open"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class BreakerStat:
    """A snapshot of a breaker, or of one of its circuits. Counters run since it was made."""

    state: BreakerState = BreakerState.CLOSED
    opened: int = 0
    """Times that a circuit opened."""
    skipped: int = 0
    """Calls that failed fast, without reaching the tier."""
    probes: int = 0
    failed_probes: int = 0
    reason: str = ""
    """Reason of the last opening; empty if there was none."""


class _Circuit:
    """The read or the write circuit of a breaker; logs a failure once, then once a minute, and the recovery."""

    def __init__(self, breaker: Breaker, verb: str, meanwhile: str, probe: Callable[[Deadline], object]) -> None:
        self.stat = BreakerStat()
        self.ended = threading.Event()
        self._breaker, self._name, self._probe = breaker, breaker.name, probe
        self._verb, self._meanwhile = verb, meanwhile
        self._lock = threading.Lock()
        self._next_probe = 0.0
        self._notices = Notices(logger, clock=breaker.clock)
        self._is_said = False
        """Whether the last log line reported a failure."""

    def guard(self, ask: Callable[[], _T], deadline: Deadline) -> _T:
        if self.stat.state is not BreakerState.CLOSED:
            with self._lock:
                self.stat = replace(self.stat, skipped=self.stat.skipped + 1)
            raise TierUnavailable(
                f"the {self._name} tier is not {self._verb}, because that failed: {self.stat.reason}; "
                f"it is probed about every {self._breaker.interval_seconds:g} s and used again when that works"
            )
        start = self._breaker.clock()
        try:
            result = ask()
        except TierUnavailable as error:
            self._fail(str(error))
            raise
        seconds = self._breaker.clock() - start
        if seconds >= SLOW_SECONDS and deadline.has_passed:
            self._fail(f"it was not done after {seconds:.2f} s")
        return result

    def probe_if_due(self) -> bool:
        with self._lock:
            if self.stat.state is not BreakerState.OPEN or self._breaker.clock() < self._next_probe:
                return self.stat.state is BreakerState.CLOSED
            self.stat = replace(self.stat, state=BreakerState.HALF_OPEN, probes=self.stat.probes + 1)
        reason = None
        try:
            self._probe(Deadline(PROBE_SECONDS))
        except TierFull:
            pass
        except TierUnavailable as error:
            reason = str(error)
        except Exception as error:  # any error: the circuit must not stay half-open
            logger.exception("probing the %s tier", self._name)
            reason = repr(error)
        with self._lock:
            if reason is not None:
                self._open(replace(self.stat, failed_probes=self.stat.failed_probes + 1, reason=reason))
                return False
            self.stat = replace(self.stat, state=BreakerState.CLOSED)
            if self._is_said:
                self._is_said = False
                logger.warning("the %s tier can be %s again", self._name, self._verb)
        return True

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self.stat.state is not BreakerState.CLOSED:
                return
            self._open(replace(self.stat, opened=self.stat.opened + 1, reason=reason))
        if self._breaker.in_background and not self.ended.is_set():
            try:
                threading.Thread(target=self._keep_probing, name=f"kvmosaic-probe-{self._name}", daemon=True).start()
            except RuntimeError:  # no more threads: it would never be probed
                logger.exception("the %s tier is asked again at once", self._name)
                with self._lock:
                    self.stat = replace(self.stat, state=BreakerState.CLOSED)

    def _open(self, stat: BreakerStat) -> None:
        self.stat = replace(stat, state=BreakerState.OPEN)
        jitter = random.uniform(1 - self._breaker.jitter, 1 + self._breaker.jitter)  # noqa: S311 (guards nothing)
        self._next_probe = self._breaker.clock() + self._breaker.interval_seconds * jitter
        text = f"the {self._name} tier cannot be {self._verb}; it {self._meanwhile}: {stat.reason}"
        self._is_said |= self._notices.warn("fails", text)

    def _keep_probing(self) -> None:
        while not self.ended.wait(max(0.001, self._next_probe - self._breaker.clock())):
            if self.probe_if_due():
                return


class Breaker:
    """A tier that fails fast, with `TierUnavailable`, while the wrapped tier is known to fail.

        get, exists, scan               ──▶ reads, probed by `exists` of one key         ──▶ tier
        put, delete, touch, quarantine  ──▶ writes, probed by `put` of an empty entry    ──▶ tier

                        a call fails
              CLOSED ─────────────────▶ OPEN ◀──┐ the probe fails
                 ▲ the probe succeeds     │ every `interval_seconds`
                 └─────── HALF_OPEN ◀─────┘─────┘

    Both circuits open independently, so that a disk that became read-only, or a Redis that accepts no more writes, is
    still read. A call fails if it raises `TierUnavailable`, or if it took `SLOW_SECONDS` or more and its deadline ended
    it. `TierFull` is no failure. The probes run on threads that live while a circuit is open.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        interval_seconds: float = 1.0,
        jitter: float = 0.2,
        clock: Callable[[], float] = time.monotonic,
        in_background: bool = True,
    ) -> None:
        """Wraps `tier` and owns it from now on.

        Args:
            tier: the tier that may fail.
            interval_seconds: between two probes.
            jitter: maximum random share by which the interval varies, so that processes do not probe at once.
            clock: monotonic seconds.
            in_background: probe on threads; otherwise only `probe_if_due` probes.
        """
        self.tier, self.name, self.is_persistent = tier, tier.name, tier.is_persistent
        self.interval_seconds, self.jitter = interval_seconds, jitter
        self.clock, self.in_background = clock, in_background
        self._reads = _Circuit(self, "read", "is left alone until it answers again", self._try_to_read)
        self._writes = _Circuit(self, "written", "is only read until that works again", self._try_to_write)

    @property
    def is_open(self) -> bool:
        """Whether reads or writes fail fast now."""
        return self.breaker_stat.state is not BreakerState.CLOSED

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
        stats = reads, writes = self.read_stat, self.write_stat
        worse = max(stats, key=lambda stat: (list(BreakerState).index(stat.state), bool(stat.reason)))
        counters = ("opened", "skipped", "probes", "failed_probes")
        return replace(worse, **{name: getattr(reads, name) + getattr(writes, name) for name in counters})

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """See `Tier.put_many`."""
        return self._writes.guard(lambda: self.tier.put_many(entries, deadline), deadline)

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        """See `Tier.get_many`."""
        return self._reads.guard(lambda: self.tier.get_many(keys, deadline, max_bytes=max_bytes), deadline)

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.exists_many`."""
        return self._reads.guard(lambda: self.tier.exists_many(keys, deadline), deadline)

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.delete_many`."""
        return self._writes.guard(lambda: self.tier.delete_many(keys, deadline), deadline)

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """See `Tier.touch`."""
        self._writes.guard(lambda: self.tier.touch(keys, deadline), deadline)

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """See `Tier.quarantine`."""
        self._writes.guard(lambda: self.tier.quarantine(key, reason, deadline), deadline)

    def scan(self, deadline: Deadline) -> Iterator[EntryInfo]:
        """See `Tier.scan`. A slow reader is no failure."""
        infos = self._reads.guard(lambda: self.tier.scan(deadline), Deadline())
        while (info := self._reads.guard(lambda: next(infos, None), Deadline())) is not None:
            yield info

    def stat(self) -> TierStat:
        """See `Tier.stat`; see also `breaker_stat`."""
        return self.tier.stat()

    def close(self) -> None:
        """Stops probing and closes the tier."""
        self._reads.ended.set()
        self._writes.ended.set()
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


@runtime_checkable
class Peeking(Protocol):
    """A tier that can read the start of an entry."""

    def peek(self, key: Key, num_bytes: int, deadline: Deadline) -> Entry | None:
        """The first bytes of an entry, fewer if it has fewer; None if it is absent. Not a use, not verified.

        Raises:
            TierUnavailable: the place fails.
        """
        ...


def peek(tier: Tier, key: Key, num_bytes: int = MAX_ENTRY_BYTES, *, deadline: Deadline) -> Entry | None:
    """The first bytes of an entry; a tier that cannot peek reads all of it, which counts as a use.

    Raises:
        TierUnavailable: the place fails.
    """
    tier = tier.tier if isinstance(tier, Breaker) else tier
    if isinstance(tier, Peeking):
        return tier.peek(key, num_bytes, deadline)
    return tier.get_many([key], deadline).get(key)
