"""Hierarchy: the tiers in their order, and the threads that move chunks up and down behind the engine's back."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidEntry, TierError
from kvmosaic.tiers.cost import LoadCost
from kvmosaic.tiers.deadline import Deadline
from kvmosaic.tiers.fetch import Fetch
from kvmosaic.tiers.tier import Entry, Tier, TierStat

logger = logging.getLogger("kvmosaic")

T = TypeVar("T")

PUT_SECONDS = 30.0
GET_SECONDS = 30.0
FIRST_PATIENCE_SECONDS = 0.15
"""To wait for a tier beyond what loading is expected to take: what a tier that hangs costs a request at most."""
SLOWEST_BYTES_PER_SECOND = 50e6
"""Of a tier that nothing is known of yet; it is given up when it is slower."""
LOOK_SECONDS = 5.0
"""So often a tier that was too slow is measured again, with nobody waiting."""


@dataclass(slots=True)
class HierarchyStats:
    """What has been moved; counters run since the start."""

    stored: int = 0
    """Chunks that reached a tier."""
    dropped: int = 0
    """Chunks that were not stored because too much waited to be written."""
    failed: int = 0
    """Chunks that could not be stored: their tiers failed."""
    fetched: int = 0
    """Chunks that were found in a tier, verified and decoded."""
    missed: int = 0
    """Chunks that were in no tier that could be asked."""
    skipped: int = 0
    """Tiers that were not asked, because computing is faster."""
    late: int = 0
    """Chunks that came when nobody waited any longer."""
    invalid: int = 0
    """Entries that were not what they should be, and were put aside."""


@dataclass(slots=True, eq=False)
class _Store(Generic[T]):
    key: Key
    value: T
    num_bytes: int
    encode: Callable[[T], Entry]
    tiers: tuple[Tier, ...]
    done: Callable[[bool], None]


class Hierarchy(Generic[T]):
    """Stores what the device has, and fetches what it has not. `T` is a chunk in memory: its tensors.

        engine ── store ──▶ writes ──▶ writer ──▶ host ▸ disk ▸ redis
           ▲                  │ found here, too                │
           └──── fetch ◀──────┴────────── readers ◀────────────┘

    The first tier is the fastest. Chunks that are complete go to the persistent tiers, so that no crash loses them;
    chunks that leave the device go to the others. A fetch asks one tier after the other; whatever goes wrong in one of
    them, the next is asked, and in the end the chunk is computed.

    No method waits for a tier, except `flush` and `close`. All are safe on any thread.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        most_pending_bytes: int,
        num_readers: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes tiers, fastest first; `close` closes them.

        Args:
            tiers: those that may fail or hang should be guarded by a `Breaker`.
            most_pending_bytes: of chunks that wait to be written; more are dropped.
            num_readers: threads that fetch.
            clock: seconds that never run backwards.
        """
        self.tiers = tuple(tiers)
        self.stats = HierarchyStats()
        self.pending_bytes = 0
        self.last_ended = clock()
        """When a fetch was over for the last time: as long as some are, the others are worth waiting for."""
        self._most_pending_bytes = most_pending_bytes
        self._num_readers = num_readers
        self._clock = clock
        self._costs = {id(tier): LoadCost() for tier in self.tiers}
        self._looked = dict.fromkeys(self._costs, clock())
        # shared by all threads, under `_changed`
        self._changed = threading.Condition()
        self._writes: dict[Key, _Store[T]] = {}
        """In the order in which they came; one stays here until it is written."""
        self._writing: Key | None = None
        self._deletes: set[Key] = set()
        self._fetches: dict[Key, Fetch[T]] = {}
        self._wanted: deque[Fetch[T]] = deque()
        self._threads: list[threading.Thread] = []
        self._is_closing = False

    @property
    def has_persistent(self) -> bool:
        """Whether some tier outlives the process."""
        return any(tier.is_persistent for tier in self.tiers)

    @property
    def has_volatile(self) -> bool:
        """Whether some tier is for chunks that leave the device."""
        return any(not tier.is_persistent for tier in self.tiers)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a chunk of this size would be queued now; if not, it is counted as dropped."""
        if self.pending_bytes + num_bytes <= self._most_pending_bytes:
            return True
        self.stats.dropped += 1
        return False

    def store(
        self,
        key: Key,
        value: T,
        num_bytes: int,
        encode: Callable[[T], Entry],
        *,
        persistent: bool,
        volatile: bool,
        done: Callable[[bool], None] = lambda _: None,
    ) -> bool:
        """Queues a chunk to be written; returns False, and does nothing, if too much is queued already.

        Args:
            key: of the chunk.
            value: its tensors, which nobody changes any more.
            num_bytes: how large they are.
            encode: makes an entry of them, on the writer's thread.
            persistent: to the tiers that outlive the process.
            volatile: to the others.
            done: told on the writer's thread whether every one of these tiers has it now.
        """
        tiers = tuple(tier for tier in self.tiers if (persistent if tier.is_persistent else volatile))
        if not tiers:
            return True
        with self._changed:
            if self._is_closing:
                return False
            if (known := self._writes.get(key)) is not None and key != self._writing:
                known.tiers = tuple(tier for tier in self.tiers if tier in known.tiers or tier in tiers)
                return True
            if self.pending_bytes + num_bytes > self._most_pending_bytes:
                self.stats.dropped += 1
                return False
            self._writes.pop(key, None)  # behind the others, if it is being written at this moment
            self._writes[key] = _Store(key, value, num_bytes, encode, tiers, done)
            self.pending_bytes += num_bytes
            self._start()
            self._changed.notify_all()
        return True

    def fetch(
        self, key: Key, num_bytes: int, accept: Callable[[Entry], T], compute_seconds: float | None
    ) -> Fetch[T] | None:
        """Begins to look for a chunk, or joins those who do; None if it cannot be worth it."""
        with self._changed:
            if self._is_closing or key in self._deletes:
                return None
            if (known := self._fetches.get(key)) is not None:
                return known
            expected = [self._costs[id(tier)].estimate(num_bytes) for tier in self.tiers]
            slowest = max((seconds for seconds in expected if seconds is not None), default=None)
            if slowest is None:
                slowest = num_bytes / SLOWEST_BYTES_PER_SECOND
            if compute_seconds is not None:
                slowest = min(slowest, compute_seconds)
            fetch = Fetch(key, num_bytes, accept, compute_seconds, self._clock(), FIRST_PATIENCE_SECONDS + slowest)
            if (queued := self._writes.get(key)) is not None:
                fetch.value, fetch.tier_name, fetch.is_over = queued.value, "memory", True
                self.stats.fetched += 1
                return fetch
            self._fetches[key] = fetch
            self._wanted.append(fetch)
            self._start()
            self._changed.notify_all()
        return fetch

    def wait(self, seconds: float) -> None:
        """Sleeps until a fetch is over, but no longer than this."""
        with self._changed:
            if self._fetches:
                self._changed.wait(seconds)

    def delete(self, keys: Collection[Key]) -> None:
        """Has chunks removed from all tiers; from now on they are not found, until they are stored again.

        A tier that fails keeps what it has, which is logged.
        """
        with self._changed:
            if self._is_closing or not keys:
                return
            for key in keys:
                if key != self._writing and (store := self._writes.pop(key, None)) is not None:
                    self.pending_bytes -= store.num_bytes
            self._deletes.update(keys)
            self._start()
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until everything is written or deleted; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._writes and not self._deletes, timeout=seconds)

    def close(self, seconds: float = PUT_SECONDS) -> None:
        """Writes what is queued, if that is possible in this time, and closes the tiers; again is harmless."""
        self.flush(seconds)
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._writes.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout=1.0)
        for tier in self.tiers:
            tier.close()

    def tier_stats(self) -> list[TierStat]:
        """One for every tier, fastest first."""
        return [tier.stat() for tier in self.tiers]

    def bytes_per_second(self, tier: Tier) -> float | None:
        """Measured when loading, verifying and decoding included; None before the first hit."""
        return self._costs[id(tier)].bytes_per_second

    def _start(self) -> None:
        if self._threads:
            return
        runs = [self._write_all, *[self._read_all] * self._num_readers]
        for number, run in enumerate(runs):
            thread = threading.Thread(target=run, name=f"kvmosaic-tiers-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or bool(self._writes or self._deletes))
                if self._is_closing:
                    return
                deletes = frozenset(self._deletes)
            if deletes:
                self._delete(deletes)
                continue
            with self._changed:
                if not self._writes:
                    continue
                store = next(iter(self._writes.values()))
                self._writing = store.key
            is_stored = self._write(store)
            with self._changed:
                self._writing = None
                if self._writes.get(store.key) is store:
                    del self._writes[store.key]
                self.pending_bytes -= store.num_bytes
                self.stats.stored += is_stored
                self.stats.failed += not is_stored
                self._changed.notify_all()
            store.done(is_stored)

    def _delete(self, keys: frozenset[Key]) -> None:
        for tier in self.tiers:
            try:
                tier.delete_many(keys, Deadline(PUT_SECONDS))
            except TierError as error:
                logger.warning("%d chunks could not be deleted from the tier %s: %s", len(keys), tier.name, error)
        with self._changed:
            self._deletes -= keys
            self._changed.notify_all()

    def _write(self, store: _Store[T]) -> bool:
        entry: Entry | None = None
        is_stored = True
        for tier in store.tiers:
            deadline = Deadline(PUT_SECONDS)
            try:
                if tier.exists_many([store.key], deadline):
                    tier.touch([store.key], deadline)
                    continue
                entry = store.encode(store.value) if entry is None else entry
                is_stored &= store.key in tier.put_many({store.key: entry}, deadline)
            except TierError as error:
                is_stored = False
                logger.debug("a chunk was not stored in the tier %s: %s", tier.name, error)
            except Exception:
                is_stored = False
                logger.exception("a chunk was not stored in the tier %s", tier.name)
        return is_stored

    def _read_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or bool(self._wanted))
                if self._is_closing:
                    return
                fetch = self._wanted.popleft()
            try:
                self._read(fetch)
            except Exception:
                logger.exception("a chunk could not be fetched")
            with self._changed:
                now = self._clock()
                self.stats.late += fetch.value is not None and fetch.is_settled(now, self.last_ended)
                self.stats.fetched += fetch.value is not None
                self.stats.missed += fetch.value is None
                fetch.is_over, self.last_ended = True, now
                self._fetches.pop(fetch.key, None)
                self._changed.notify_all()

    def _read(self, fetch: Fetch[T]) -> None:
        for tier in self.tiers:
            if not self._is_worth(tier, fetch):
                self.stats.skipped += 1
                continue
            if self._look_into(tier, fetch):
                return

    def _is_worth(self, tier: Tier, fetch: Fetch[T]) -> bool:
        """Whether a tier is expected to be faster than computing; now and then it is asked all the same."""
        expected = self._costs[id(tier)].estimate(fetch.num_bytes)
        if expected is None or fetch.compute_seconds is None or expected < fetch.compute_seconds:
            return True
        now = self._clock()
        if now - self._looked[id(tier)] < LOOK_SECONDS:
            return False
        self._looked[id(tier)] = now
        fetch.patience = 0.0  # nobody waits for a mere look
        return True

    def _look_into(self, tier: Tier, fetch: Fetch[T]) -> bool:
        """Asks one tier; True if it has the chunk."""
        cost, begin = self._costs[id(tier)], self._clock()
        try:
            entry = tier.get_many([fetch.key], Deadline(GET_SECONDS)).get(fetch.key)
            if entry is None:
                cost.note_miss(self._clock() - begin)
                return False
            value = fetch.accept(entry)
        except InvalidEntry as error:
            self.stats.invalid += 1
            logger.warning("an entry of the tier %s is put aside and not used: %s", tier.name, error)
            self._put_aside(tier, fetch.key, str(error))
            return False
        except TierError as error:
            logger.debug("the tier %s could not be asked: %s", tier.name, error)
            return False
        cost.note_hit(fetch.num_bytes, self._clock() - begin)
        fetch.value, fetch.tier_name, fetch.is_persistent = value, tier.name, tier.is_persistent
        return True

    def _put_aside(self, tier: Tier, key: Key, reason: str) -> None:
        try:
            tier.quarantine(key, reason, Deadline(PUT_SECONDS))
        except TierError as error:
            logger.warning("an entry of the tier %s could not be put aside: %s", tier.name, error)
