"""Fetches: chunks being loaded from tiers, the threads that load them, and what they count."""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Generic, TypeAlias, TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidEntry, OtherSecret, TierError
from kvmosaic.tiers.fetch_policy import FetchPolicy
from kvmosaic.tiers.tier import Deadline, Entry, Notices, Tier, check_size

T = TypeVar("T")

Rank: TypeAlias = tuple[float, ...]
"""Smaller is fetched first."""
logger = logging.getLogger("kvmosaic")
GET_SECONDS = 10.0
ASIDE_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class Fetch(Generic[T]):
    """A future for a chunk, shared by all requests that miss it, each with its own wait limit.

    queued ──▶ begun ──▶ over with a value: `value` and `tier_name`
       └─────────┴─────▶ over without one: in no tier, in none that is fast enough, or cancelled
    """

    key: Key
    num_bytes: int
    """Bytes of the chunk on the device."""
    accept: Callable[[Entry], T] = field(repr=False)
    """Verifies an entry and decodes it; raises InvalidEntry."""
    max_bytes: int | None
    """Maximum bytes of an entry of this key; a larger one is not read. None: the tier's own limit."""
    compute_seconds: float | None
    """Expected seconds of computing it; None if unknown."""
    started: float
    timeout: float
    """Wait limit in seconds: from the moment it begins, or, while it is queued, from the last time that any fetch
    ended."""
    rank: Rank = ()
    """Lowest rank among its waiting requests."""
    begun: float | None = None
    """When a worker began it."""
    value: T | None = field(default=None, repr=False)
    tier_name: str = ""
    is_persistent: bool = False
    """Whether that tier outlives the process."""
    is_over: bool = False

    def is_settled(self, now: float, last_ended: float) -> bool:
        """Whether waiting has ended, with a value or without; `last_ended` is when any fetch last ended."""
        since = max(self.started, last_ended) if self.begun is None else self.begun
        return self.is_over or now >= since + self.timeout


@dataclass(slots=True)
class TieredStoreStats:
    """Chunks moved between device and tiers; counters run since the start."""

    stored: int = 0
    """Chunks that reached a tier."""
    dropped: int = 0
    """Chunks not stored because the write queue was full."""
    failed: int = 0
    """Chunks not stored because their tiers failed."""
    fetched: int = 0
    """Chunks found in a tier, verified and decoded."""
    missed: int = 0
    """Chunks in none of the available tiers."""
    skipped: int = 0
    """Tiers not asked, because computing is faster."""
    looked: int = 0
    """Probes of tiers that were too slow, without a waiting request."""
    late: int = 0
    """Chunks fetched after all requests stopped waiting."""
    invalid: int = 0
    """Invalid entries, which were quarantined."""


class FetchWorkers(Generic[T]):
    """A priority queue of fetches, and the threads that ask the tiers for them.

        fetches   key -> fetch that others may join
        wanted    heap of (rank, number, fetch, the tier to probe); over or begun ones are skipped
        reading   in-flight fetch of each thread

    Methods that say "locked" are called with `changed` held; the tiers are never asked under it.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        fetch_policy: FetchPolicy,
        stats: TieredStoreStats,
        changed: threading.Condition,
        num_readers: int,
        clock: Callable[[], float],
    ) -> None:
        self.fetches: dict[Key, Fetch[T]] = {}
        self.num_ended = 0
        """Fetches that are over; waiters compare it to notice progress."""
        self.last_ended = clock()
        """When a fetch last ended: as long as some end, queued ones are worth waiting for."""
        self.is_closing = False
        self._tiers = tiers
        self._fetch_policy = fetch_policy
        self._warned: list[Tier] = []
        self._stats = stats
        self._changed = changed
        self._clock = clock
        self._notices = Notices(logger, clock=clock)
        self._wanted: list[tuple[Rank, int, Fetch[T], Tier | None]] = []
        self._count = count()
        self._reading: list[Fetch[T] | None] = [None] * num_readers

    def join(self, key: Key, rank: Rank) -> Fetch[T] | None:
        """Locked: the in-flight or queued fetch of this key, moved forward in the queue if needed."""
        fetch = self.fetches.get(key)
        if fetch is not None and fetch.begun is None and rank < fetch.rank:
            fetch.rank = rank
            self._enqueue(fetch)
        return fetch

    def begin(self, fetch: Fetch[T]) -> bool:
        """Locked: queues a fetch; False, without any effect, if waiting for it cannot pay off."""
        if self._is_stuck(fetch.started):
            return False
        tiers = [tier for tier in self._tiers if self._decide(tier, fetch)]
        if not tiers:
            return False
        fetch.timeout = self._fetch_policy.timeout(tiers, fetch.num_bytes, fetch.compute_seconds)
        self.fetches[fetch.key] = fetch
        self._enqueue(fetch)
        return True

    def end(self, fetch: Fetch[T]) -> None:
        """Locked: removes a fetch, so that none joins it, and wakes its waiters."""
        fetch.is_over = True
        if self.fetches.get(fetch.key) is fetch:
            del self.fetches[fetch.key]
        self.last_ended = self._clock()
        self.num_ended += 1
        self._changed.notify_all()

    def run(self, number: int) -> None:
        """Worker loop of thread `number`, until closed."""
        while True:
            with self._changed:
                self._reading[number] = None
                self._changed.wait_for(lambda: self.is_closing or bool(self._wanted))
                if self.is_closing:
                    return
                _, _, fetch, look_at = heapq.heappop(self._wanted)
                if fetch.is_over or fetch.begun is not None:
                    continue
                fetch.begun = self._clock()
                self._reading[number] = fetch
            found: tuple[T, Tier] | None = None
            try:
                found = self._read(fetch, look_at)
            except Exception:
                logger.exception("a chunk could not be fetched")
            if look_at is None:
                self._hand_over(number, fetch, found)

    def _hand_over(self, number: int, fetch: Fetch[T], found: tuple[T, Tier] | None) -> None:
        with self._changed:
            self._reading[number] = None  # a woken waiter must not take it for hanging
            if fetch.is_over:  # deleted meanwhile
                return
            self._stats.fetched += found is not None
            self._stats.missed += found is None
            if found is not None:
                self._stats.late += fetch.is_settled(self._clock(), self.last_ended)
                fetch.value, fetch.tier_name, fetch.is_persistent = found[0], found[1].name, found[1].is_persistent
            self.end(fetch)

    def _read(self, fetch: Fetch[T], look_at: Tier | None) -> tuple[T, Tier] | None:
        """The chunk and its tier: the first tier that has it."""
        for tier in self._tiers if look_at is None else (look_at,):
            # a tier worth asking when this was queued may not be so any more
            if look_at is None and not self._fetch_policy.is_worth(tier, fetch.num_bytes, fetch.compute_seconds):
                self._stats.skipped += 1
            elif (value := self._ask(tier, fetch, is_look=look_at is not None)) is not None:
                return value, tier
        return None

    def _ask(self, tier: Tier, fetch: Fetch[T], *, is_look: bool) -> T | None:
        """Asks one tier."""
        begin, busy_begin = self._clock(), time.thread_time()
        try:
            found = tier.get_many([fetch.key], Deadline(GET_SECONDS), max_bytes=fetch.max_bytes)
            entry = found.get(fetch.key)
            if entry is None:
                self._fetch_policy.note_miss(tier, self._clock() - begin, time.thread_time() - busy_begin)
                return None
            check_size(fetch.key, memoryview(entry).nbytes, fetch.max_bytes)
            value = fetch.accept(entry)
        except OtherSecret as error:
            self._stats.invalid += 1
            if tier not in self._warned:
                self._warned.append(tier)
                logger.warning("entries of the tier %s are not used, and left alone: %s", tier.name, error)
            return None
        except InvalidEntry as error:
            self._stats.invalid += 1
            logger.warning("an entry of the tier %s is put aside and not used: %s", tier.name, error)
            self._put_aside(tier, fetch.key, str(error))
            return None
        except TierError as error:
            logger.debug("the tier %s could not be asked: %s", tier.name, error)
            return None
        except Exception:
            logger.exception("the tier %s could not be asked", tier.name)
            return None
        seconds, busy_seconds = self._clock() - begin, time.thread_time() - busy_begin
        self._fetch_policy.note_hit(tier, fetch.num_bytes, seconds, busy_seconds, is_look=is_look)
        return value

    def _put_aside(self, tier: Tier, key: Key, reason: str) -> None:
        try:
            tier.quarantine(key, reason, Deadline(ASIDE_SECONDS))
        except TierError as error:
            self._notices.warn(id(tier), f"an entry of the {tier.name} tier could not be put aside: {error}")
        except Exception:
            logger.exception("an entry of the tier %s could not be put aside", tier.name)

    def _enqueue(self, fetch: Fetch[T], look_at: Tier | None = None) -> None:
        heapq.heappush(self._wanted, (fetch.rank, next(self._count), fetch, look_at))
        self._changed.notify_all()

    def _decide(self, tier: Tier, fetch: Fetch[T]) -> bool:
        """Decides whether to ask a tier: if that should be faster than computing. Probes a slow one now and then."""
        if self._fetch_policy.is_worth(tier, fetch.num_bytes, fetch.compute_seconds):
            return True
        self._stats.skipped += 1
        if self._fetch_policy.take_probe_slot(tier):
            self._stats.looked += 1
            rank = (math.inf,)  # after all fetches with waiters
            look = replace(fetch, compute_seconds=None, timeout=0.0, rank=rank)
            self._enqueue(look, tier)
        return False

    def _is_stuck(self, now: float) -> bool:
        """Whether all workers hang: queued fetches then cannot pay off."""
        return all(fetch is not None and fetch.is_settled(now, now) for fetch in self._reading)
