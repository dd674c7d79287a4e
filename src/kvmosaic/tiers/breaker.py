"""Breaker: stops asking a tier that fails, and asks in the background until it answers again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidConfig, TierFull, TierUnavailable
from kvmosaic.tiers.deadline import Deadline
from kvmosaic.tiers.tier import Entry, EntryInfo, Tier, TierStat

logger = logging.getLogger("kvmosaic")

MAX_FAILURES = 1000
MAX_SECONDS = 3600.0
_PROBED = Key(bytes(32))

_T = TypeVar("_T")


class BreakerState(StrEnum):
    """Whether the tier behind a breaker is asked."""

    CLOSED = "closed"
    """It answers, and is asked."""
    OPEN = "open"
    """It failed, and is left alone."""
    HALF_OPEN = "half-open"
    """It failed, and is being probed now; others still leave it alone."""


@dataclass(frozen=True, slots=True)
class BreakerStat:
    """One moment of a breaker. Counters run since it was made."""

    state: BreakerState
    opened: int
    """Times that the tier was given up."""
    skipped: int
    """Calls that were refused without asking the tier."""
    probes: int
    failed_probes: int
    reason: str
    """Why it was given up last; empty if it never was."""


class Breaker:
    """A tier that fails at once while the tier behind it is known to fail.

                        `failures` calls in a row fail
              CLOSED ──────────────────────────────────────▶ OPEN ◀──┐
            asks the tier                             TierUnavailable │ the probe fails
                 ▲                                        at once     │
                 │        the probe is answered             │ every `interval_seconds`
                 └──────────────────────── HALF_OPEN ◀──────┘─────────┘

    A call fails if it raises `TierUnavailable`, or if it took `slow_seconds` or more and its deadline ended it.
    `TierFull` is an answer. The probe asks whether one key exists, from a thread that lives while the breaker is open.
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
        """Guards `tier`, which it then owns.

        Args:
            tier: the tier that may fail.
            failures: how many calls in a row must fail before it is given up.
            interval_seconds: between two probes.
            jitter: up to which share of it the interval is longer or shorter, so that not all processes ask at once.
            probe_seconds: how long a probe may take.
            slow_seconds: the shortest call that counts as failed when its deadline ends it.
            clock: seconds, never running backwards.
            in_background: without it nothing probes but `probe_if_due`.

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
        self._jitter = jitter
        self._failures = failures
        self._interval = interval_seconds
        self._probe_seconds = probe_seconds
        self._slow_seconds = slow_seconds
        self._clock = clock
        self._in_background = in_background
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._state = BreakerState.CLOSED
        self._next_probe = 0.0
        self._failed_in_a_row = 0
        self._opened = self._skipped = self._probes = self._failed_probes = 0
        self._reason = ""

    @property
    def name(self) -> str:
        """That of the tier."""
        return self.tier.name

    @property
    def is_persistent(self) -> bool:
        """That of the tier."""
        return self.tier.is_persistent

    @property
    def is_open(self) -> bool:
        """Whether calls would fail at once now."""
        return self._state is not BreakerState.CLOSED

    @property
    def breaker_stat(self) -> BreakerStat:
        """What it holds back now, and has held back."""
        with self._lock:
            return BreakerStat(
                self._state, self._opened, self._skipped, self._probes, self._failed_probes, self._reason
            )

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """As the tier; at once `TierUnavailable` while open."""
        return self._guard(lambda: self.tier.put_many(entries, deadline), deadline)

    def get_many(self, keys: Collection[Key], deadline: Deadline) -> dict[Key, Entry]:
        """As the tier; at once `TierUnavailable` while open."""
        return self._guard(lambda: self.tier.get_many(keys, deadline), deadline)

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """As the tier; at once `TierUnavailable` while open."""
        return self._guard(lambda: self.tier.exists_many(keys, deadline), deadline)

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """As the tier; at once `TierUnavailable` while open."""
        return self._guard(lambda: self.tier.delete_many(keys, deadline), deadline)

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """As the tier; at once `TierUnavailable` while open."""
        self._guard(lambda: self.tier.touch(keys, deadline), deadline)

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """As the tier; at once `TierUnavailable` while open."""
        self._guard(lambda: self.tier.quarantine(key, reason, deadline), deadline)

    def scan(self, deadline: Deadline) -> Iterator[EntryInfo]:
        """As the tier; at once `TierUnavailable` while open. Its reader sets the pace, so being slow is no failure."""
        infos = self._guard(lambda: self.tier.scan(deadline), Deadline())
        while (info := self._guard(lambda: next(infos, None), Deadline())) is not None:
            yield info

    def stat(self) -> TierStat:
        """Of the tier; see also `breaker_stat`."""
        return self.tier.stat()

    def close(self) -> None:
        """Ends the probing and closes the tier."""
        self._ended.set()
        self.tier.close()

    def probe_if_due(self) -> bool:
        """Asks the tier again if it is open and the interval is over; returns whether the breaker is closed now."""
        with self._lock:
            if self._state is not BreakerState.OPEN or self._clock() < self._next_probe:
                return self._state is BreakerState.CLOSED
            self._state = BreakerState.HALF_OPEN
            self._probes += 1
        answered = False
        try:
            self.tier.exists_many([_PROBED], Deadline(self._probe_seconds))
            answered = True
        except TierFull:
            answered = True
        except Exception as error:  # whatever it is, the breaker must not stay half-open
            if not isinstance(error, TierUnavailable):
                logger.exception("probing the %s tier", self.name)
        with self._lock:
            self._settle(answered)
        return answered

    def _settle(self, answered: bool) -> None:
        if answered:
            self._state = BreakerState.CLOSED
            self._failed_in_a_row = 0
            logger.info("the %s tier answers again", self.name)
        else:
            self._state = BreakerState.OPEN
            self._failed_probes += 1
            self._next_probe = self._clock() + self._pause()

    def _guard(self, ask: Callable[[], _T], deadline: Deadline) -> _T:
        if self.is_open:
            with self._lock:
                self._skipped += 1
                reason = self._reason
            raise TierUnavailable(
                f"the {self.name} tier is not asked, because it failed: {reason}; "
                f"it is probed about every {self._interval:g} s and used again when it answers"
            )
        start = self._clock()
        try:
            result = ask()
        except TierUnavailable as error:
            self._count_failure(str(error))
            raise
        except TierFull:
            self._failed_in_a_row = 0
            raise
        seconds = self._clock() - start
        if seconds >= self._slow_seconds and deadline.has_passed:
            self._count_failure(f"it was not done after {seconds:.2f} s")
        else:
            self._failed_in_a_row = 0
        return result

    def _count_failure(self, reason: str) -> None:
        with self._lock:
            self._failed_in_a_row += 1
            if self._state is not BreakerState.CLOSED or self._failed_in_a_row < self._failures:
                return
            self._state = BreakerState.OPEN
            self._opened += 1
            self._reason = reason
            self._next_probe = self._clock() + self._pause()
        logger.warning("the %s tier is left alone until it answers again: %s", self.name, reason)
        if self._in_background and not self._ended.is_set():
            try:
                threading.Thread(target=self._probe, name=f"kvmosaic-probe-{self.name}", daemon=True).start()
            except RuntimeError:  # the system gives no more threads: nobody would ever probe it
                logger.exception("the %s tier is asked again at once", self.name)
                with self._lock:
                    self._state = BreakerState.CLOSED

    def _probe(self) -> None:
        while not self._ended.wait(max(0.001, self._next_probe - self._clock())):
            if self.probe_if_due():
                return

    def _pause(self) -> float:
        return self._interval * random.uniform(1 - self._jitter, 1 + self._jitter)  # noqa: S311 (spreads load, guards nothing)
