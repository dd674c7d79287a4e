"""Circuit: state machine of a circuit breaker, for one kind of call of a tier."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from kvmosaic.errors import InvalidEntry, TierFull, TierUnavailable
from kvmosaic.tiers.notices import Notices
from kvmosaic.tiers.tier import Deadline

logger = logging.getLogger("kvmosaic")

_T = TypeVar("_T")


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
