"""Circuit: whether one kind of call of a tier is made, or refused because calls of this kind fail."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from kvmosaic.errors import InvalidEntry, TierFull, TierUnavailable
from kvmosaic.tiers.deadline import Deadline
from kvmosaic.tiers.notices import Notices

logger = logging.getLogger("kvmosaic")

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


@dataclass(frozen=True, slots=True)
class Pace:
    """When a circuit opens, and how often what is behind it is probed; see `Breaker`."""

    failures: int
    interval_seconds: float
    jitter: float
    probe_seconds: float
    slow_seconds: float
    clock: Callable[[], float]
    in_background: bool


class Circuit:
    """The reads, or the writes, of a tier.

                        `failures` calls in a row fail
              CLOSED ──────────────────────────────────────▶ OPEN ◀──┐
            asks the tier                             TierUnavailable │ the probe fails
                 ▲                                        at once     │
                 │        the probe is answered             │ every `interval_seconds`
                 └──────────────────────── HALF_OPEN ◀──────┘─────────┘

    That it fails is said once, and then once a minute, with how often; if that was said, so is that it works again.
    """

    def __init__(self, name: str, verb: str, meanwhile: str, probe: Callable[[Deadline], object], pace: Pace) -> None:
        """All is well at first.

        Args:
            name: of the tier.
            verb: what it cannot be while calls fail: "read" or "written".
            meanwhile: what is done until then, for the log.
            probe: a call of this kind; it raises what the tier does.
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
        """Whether the last that was said is that it fails."""

    @property
    def stat(self) -> BreakerStat:
        """What it holds back now, and has held back."""
        with self._lock:
            return BreakerStat(self.state, self._opened, self._skipped, self._probes, self._failed_probes, self._reason)

    def close(self) -> None:
        """Ends the probing."""
        self._ended.set()

    def guard(self, ask: Callable[[], _T], deadline: Deadline) -> _T:
        """What a call returns or raises; at once `TierUnavailable` while such calls fail."""
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
        """Asks the tier if calls fail and the interval is over; returns whether they are made now."""
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
        except Exception as error:  # whatever it is, the circuit must not stay half-open
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
            except RuntimeError:  # the system gives no more threads: nobody would ever probe it
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
