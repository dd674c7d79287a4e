"""Circuit breaker of a tier: fails calls fast while the tier fails, and probes it in the background."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.errors import TierError, TierFull, TierUnavailable
from kvmosaic.tiers.tier import Deadline, Entry, Notices, Tier, TierStat

logger = logging.getLogger("kvmosaic")

_T = TypeVar("_T")
PROBE_SECONDS = 0.5
SLOW_SECONDS = 0.1
"""The shortest call that counts as failed when its deadline ends it."""
_PROBED = Key(bytes(32))


class Circuit:
    """Reads or writes of a breaker; logs a failure once, then once a minute, and the recovery."""

    def __init__(self, breaker: Breaker, verb: str, meanwhile: str, probe: Callable[[Deadline], object]) -> None:
        self.is_open = False
        """Whether calls fail fast."""
        self.opened = self.skipped = self.probes = self.failed_probes = 0
        """Since it was made; `skipped` calls did not reach the tier."""
        self.reason = ""
        """Of the last failure."""
        self._breaker, self._verb, self._meanwhile, self._probe = breaker, verb, meanwhile, probe
        self._lock, self._is_probed, self._next_probe = threading.Lock(), False, 0.0
        self._notices = Notices(logger, clock=breaker.clock)
        self._is_said = False
        """Whether the last log line reported a failure."""

    def guard(self, ask: Callable[[], _T], deadline: Deadline) -> _T:
        """What `ask` returns.

        Raises:
            TierUnavailable: the circuit is open, or this call opens it.
        """
        if self.is_open:
            with self._lock:
                self.skipped += 1
            raise TierUnavailable(
                f"the {self._breaker.name} tier is not {self._verb}, because that failed: {self.reason}; "
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
        """Probes if the circuit is open, the interval over and no other probe runs; returns whether it is closed."""
        with self._lock:
            if not self.is_open or self._is_probed or self._breaker.clock() < self._next_probe:
                return not self.is_open
            self._is_probed, self.probes = True, self.probes + 1
        reason = None
        try:
            self._probe(Deadline(PROBE_SECONDS))
        except TierFull:
            pass
        except Exception as error:  # any error: it must be probed again
            reason = str(error)
            if not isinstance(error, TierUnavailable):
                logger.exception("probing the %s tier", self._breaker.name)
        with self._lock:
            self._is_probed = False
            if reason is not None:
                self.failed_probes += 1
                self._open(reason)
                return False
            self.is_open = False
            if self._is_said:
                self._is_said = False
                logger.warning("the %s tier can be %s again", self._breaker.name, self._verb)
        return True

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self.is_open:
                return
            self.opened += 1
            self._open(reason)
        if self._breaker.in_background and not self._breaker.ended.is_set():
            name = f"kvmosaic-probe-{self._breaker.name}"
            try:
                threading.Thread(target=self._keep_probing, name=name, daemon=True).start()
            except RuntimeError:  # no more threads: it would never be probed
                logger.exception("the %s tier is asked again at once", self._breaker.name)
                self.is_open = False

    def _open(self, reason: str) -> None:
        self.reason, self.is_open = reason, True
        jitter = random.uniform(1 - self._breaker.jitter, 1 + self._breaker.jitter)  # noqa: S311 (guards nothing)
        self._next_probe = self._breaker.clock() + self._breaker.interval_seconds * jitter
        text = f"the {self._breaker.name} tier cannot be {self._verb}; it {self._meanwhile}: {reason}"
        self._is_said |= self._notices.warn("fails", text)

    def _keep_probing(self) -> None:
        while not self._breaker.ended.wait(max(0.001, self._next_probe - self._breaker.clock())):
            if self.probe_if_due():
                return


class Breaker:
    """A tier that fails fast, with `TierUnavailable`, while the wrapped tier is known to fail.

        get, exists                     ──▶ reads, probed by `exists` of one key         ──▶ tier
        put, delete, touch, quarantine  ──▶ writes, probed by `put` of an empty entry    ──▶ tier

    A call that fails opens its circuit, and a probe that succeeds closes it. The two are apart, so that a disk that
    became read-only, or a Redis that accepts no more writes, is still read. A call fails if it raises
    `TierUnavailable`, or if it took `SLOW_SECONDS` or more and its deadline ended it. `TierFull` is no failure. The
    probes run on threads that live while a circuit is open.
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
        self.ended = threading.Event()
        self.reads = Circuit(
            self, "read", "is left alone until it answers again", lambda limit: tier.exists_many([_PROBED], limit)
        )
        self.writes = Circuit(self, "written", "is only read until that works again", self._try_to_write)

    @property
    def is_open(self) -> bool:
        """Whether reads or writes fail fast now."""
        return self.reads.is_open or self.writes.is_open

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """See `Tier.put_many`."""
        return self.writes.guard(lambda: self.tier.put_many(entries, deadline), deadline)

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        """See `Tier.get_many`."""
        return self.reads.guard(lambda: self.tier.get_many(keys, deadline, max_bytes=max_bytes), deadline)

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.exists_many`."""
        return self.reads.guard(lambda: self.tier.exists_many(keys, deadline), deadline)

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.delete_many`."""
        return self.writes.guard(lambda: self.tier.delete_many(keys, deadline), deadline)

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """See `Tier.touch`."""
        self.writes.guard(lambda: self.tier.touch(keys, deadline), deadline)

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """See `Tier.quarantine`."""
        self.writes.guard(lambda: self.tier.quarantine(key, reason, deadline), deadline)

    def stat(self) -> TierStat:
        """See `Tier.stat`."""
        return self.tier.stat()

    def close(self) -> None:
        """Stops probing and closes the tier."""
        self.ended.set()
        self.tier.close()

    def probe_if_due(self) -> bool:
        """Probes open circuits if the interval is over; returns whether the tier is read and written now."""
        is_read = self.reads.probe_if_due()
        return self.writes.probe_if_due() and is_read

    def _try_to_write(self, deadline: Deadline) -> None:
        self.tier.put_many({_PROBED: b""}, deadline)
        with contextlib.suppress(TierError):
            self.tier.delete_many([_PROBED], deadline)
