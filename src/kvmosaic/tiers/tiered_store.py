"""TieredStore: the tiers in order, and the background threads that offload and fetch chunks."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.errors import TierError, TierFull
from kvmosaic.tiers.fetch import Fetch, FetchWorkers, Rank, TieredStoreStats
from kvmosaic.tiers.fetch_policy import FetchPolicy, Loading
from kvmosaic.tiers.tier import Deadline, Entry, Notices, Tier, TierStat

logger = logging.getLogger("kvmosaic")

T = TypeVar("T")

_NUM_READERS = 2
"""Threads that fetch."""
PUT_SECONDS = 30.0
IDLE_SECONDS = 2.0
"""Interval at which an idle writer checks whether its store is still in use."""


@dataclass(slots=True, eq=False)
class _Store(Generic[T]):
    key: Key
    value: T
    num_bytes: int
    encode: Callable[[T], Entry | None]
    tiers: tuple[Tier, ...]
    done: Callable[[bool], None]


class TieredStore(Generic[T]):
    """Multi-tier store: offloads chunks and fetches missing ones. `T` is a chunk in memory: its tensors.

        engine ── store ──▶ writes ──▶ writer ──▶ host ▸ disk ▸ redis
           ▲                  │ found here, too                │
           └──── fetch ◀──────┴────────── workers ◀────────────┘

    The first tier is the fastest. Complete chunks go to the persistent tiers, so that no crash loses them; chunks
    evicted from the device go to the others. A fetch asks one tier after the other; on any error in one of them, the
    next is asked, and in the end the chunk is computed.

    No method waits for a tier, except `flush` and `close`. All are thread-safe.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        max_pending_bytes: int,
        loading: Loading = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes tiers, fastest first; `close` closes them.

        Args:
            tiers: wrap tiers that may fail or hang in a `Breaker`.
            max_pending_bytes: maximum bytes of chunks queued for writing; more are dropped.
            loading: whether tiers are asked where that is expected to be faster than computing, or always.
            clock: monotonic seconds.
        """
        self.tiers = tuple(tiers)
        self.stats = TieredStoreStats()
        self.pending_bytes = 0
        self._max_pending_bytes = max_pending_bytes
        self._clock = clock
        self._notices = Notices(logger, clock=clock)
        self._fetch_policy = FetchPolicy(self.tiers, clock, loading)
        # shared by all threads, under `_changed`
        self._changed = threading.Condition()
        self._writes: dict[Key, _Store[T]] = {}
        """Write queue in FIFO order; a chunk stays here until it is written."""
        self._writing: _Store[T] | None = None
        self._deletes: set[Key] = set()
        self._readers: FetchWorkers[T] = FetchWorkers(
            self.tiers, self._fetch_policy, self.stats, self._changed, _NUM_READERS, clock
        )
        self._threads: list[threading.Thread] = []
        self._is_closing = False
        self._is_orphaned = False
        self._process_id = os.getpid()

    @property
    def last_ended(self) -> float:
        """When a fetch last ended; see `Fetch.is_settled`."""
        return self._readers.last_ended

    def longest_wait(self, num_bytes: int, compute_seconds: float | None) -> float:
        """Maximum seconds that a request waits for chunks of this total size."""
        return self._fetch_policy.longest_wait(num_bytes, compute_seconds)

    @property
    def num_ended(self) -> int:
        """Fetches that are over; see `wait`."""
        return self._readers.num_ended

    @property
    def has_persistent(self) -> bool:
        """Whether some tier outlives the process."""
        return any(tier.is_persistent for tier in self.tiers)

    @property
    def has_volatile(self) -> bool:
        """Whether some tier takes chunks evicted from the device."""
        return any(not tier.is_persistent for tier in self.tiers)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a chunk of this size would be queued now."""
        return self.pending_bytes + num_bytes <= self._max_pending_bytes

    def note_dropped(self) -> None:
        """Counts a chunk that is not stored, for lack of room in the queue."""
        self.stats.dropped += 1

    def store(
        self,
        key: Key,
        value: T,
        num_bytes: int,
        encode: Callable[[T], Entry | None],
        *,
        persistent: bool,
        volatile: bool,
        done: Callable[[bool], None] = lambda _: None,
    ) -> bool:
        """Queues a chunk for writing; returns False, and does nothing, if the queue is full.

        Args:
            key: of the chunk.
            value: its tensors, immutable from now on.
            num_bytes: size of the tensors.
            encode: makes an entry of them, on the writer's thread; returns None to cancel.
            persistent: to the tiers that outlive the process.
            volatile: to the others.
            done: called on the writer's thread, with whether all of these tiers have it now.
        """
        tiers = tuple(tier for tier in self.tiers if (persistent if tier.is_persistent else volatile))
        if not tiers:
            return True
        with self._changed:
            if self._is_closing:
                return False
            if (known := self._writes.get(key)) is not None and known is not self._writing:
                known.tiers = tuple(tier for tier in self.tiers if tier in known.tiers or tier in tiers)
                return True
            if not self.has_room(num_bytes):
                self.note_dropped()
                return False
            self._writes.pop(key, None)  # to the end of the queue, if it is being written now
            self._writes[key] = _Store(key, value, num_bytes, encode, tiers, done)
            self.pending_bytes += num_bytes
            self._start()
            self._changed.notify_all()
        return True

    def fetch(
        self,
        key: Key,
        num_bytes: int,
        accept: Callable[[Entry], T],
        compute_seconds: float | None,
        rank: Rank = (),
        known: Fetch[T] | None = None,
        *,
        max_bytes: int | None = None,
    ) -> Fetch[T] | None:
        """Begins to fetch a chunk, or joins its in-flight fetch; None if it cannot pay off.

        Args:
            key: of the chunk.
            num_bytes: its size on the device.
            accept: verifies an entry and decodes it, on a reader's thread; raises InvalidEntry.
            compute_seconds: expected seconds of computing it; None if unknown.
            rank: smaller is fetched first.
            known: an earlier fetch of this key; returned if it has ended with the chunk, also meanwhile.
            max_bytes: maximum of an entry of this key; a larger one is quarantined and not read. None: the tier's own
                limit.
        """
        with self._changed:
            if known is not None and known.value is not None:
                return known
            if self._is_closing or key in self._deletes:
                return None
            if (under_way := self._readers.join(key, rank)) is not None:
                return under_way
            fetch = Fetch(key, num_bytes, accept, max_bytes, compute_seconds, self._clock(), 0.0, rank)
            if (queued := self._writes.get(key)) is not None:
                fetch.value, fetch.tier_name, fetch.is_over = queued.value, "memory", True
                self.stats.fetched += 1
                return fetch
            self._start()
            return fetch if self._readers.begin(fetch) else None

    def cancel(self, fetch: Fetch[T]) -> None:
        """Cancels a fetch; one that has begun runs on, and its result is dropped."""
        with self._changed:
            if not fetch.is_over and fetch.begun is None:
                self._readers.end(fetch)

    def wait(self, seconds: float, num_ended: int | None = None) -> None:
        """Sleeps until a fetch is over, up to a timeout.

        Args:
            seconds: timeout.
            num_ended: `num_ended` when the caller ran out of work; None: now.
        """
        with self._changed:
            if self._readers.fetches:
                num_ended = self._readers.num_ended if num_ended is None else num_ended
                self._changed.wait_for(lambda: self._readers.num_ended != num_ended, timeout=seconds)

    def delete(self, keys: Collection[Key]) -> None:
        """Removes chunks from all tiers; they are not found from now on, until they are stored again.

        A failing tier keeps its entries, which is logged.
        """
        with self._changed:
            if self._is_closing or not keys:
                return
            for key in keys:
                if (store := self._writes.get(key)) is not None and store is not self._writing:
                    del self._writes[key]
                    self.pending_bytes -= store.num_bytes
                if (fetch := self._readers.fetches.get(key)) is not None:
                    self._readers.end(fetch)
            self._deletes.update(keys)
            self._start()
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until everything is written or deleted; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._writes and not self._deletes, timeout=seconds)

    def close(self, seconds: float = PUT_SECONDS) -> None:
        """Writes what is queued, within a timeout, and closes the tiers; a second call does nothing."""
        self.flush(seconds)
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = self._readers.is_closing = True
            self._writes.clear()
            self._changed.notify_all()
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in threads:
            thread.join(timeout=1.0)
        for tier in self.tiers:
            tier.close()
        atexit.unregister(self._close_at_exit)

    def orphan(self) -> None:
        """Marks the store as unused: what is queued is written, and it closes itself.

        Takes no lock, since the garbage collector calls it, on any thread and with any locks held.
        """
        self._is_orphaned = True

    def _close_at_exit(self) -> None:
        """Closes a store left open at exit; does nothing in a forked child, which has no threads."""
        if os.getpid() == self._process_id:
            self.close()

    def tier_stats(self) -> list[TierStat]:
        """Snapshots of all tiers, fastest first."""
        return [tier.stat() for tier in self.tiers]

    def bytes_per_second(self, tier: Tier) -> float | None:
        """Measured when loading, verifying and decoding included; None before the first hit."""
        return self._fetch_policy.bytes_per_second(tier)

    def _start(self) -> None:
        if len(self._threads) > _NUM_READERS:
            return
        if not self._threads:
            atexit.register(self._close_at_exit)
        readers = [partial(self._readers.run, number) for number in range(_NUM_READERS)]
        runs: list[Callable[[], None]] = [self._write_all, *readers]
        for number in range(len(self._threads), len(runs)):
            thread = threading.Thread(target=runs[number], name=f"kvmosaic-tiers-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads now; the next call retries
                logger.exception("a thread for the tiers could not be started")
                return
            self._threads.append(thread)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or bool(self._writes or self._deletes), IDLE_SECONDS)
                if self._is_closing:
                    return
                deletes, has_writes = frozenset(self._deletes), bool(self._writes)
            if self._is_orphaned and not deletes and not has_writes:
                self.close()
                return
            if deletes:
                self._delete(deletes)
                continue
            with self._changed:
                if not self._writes:
                    continue
                store = next(iter(self._writes.values()))
                self._writing = store
            is_stored = self._write(store)
            with self._changed:
                self._writing = None
                if self._writes.get(store.key) is store:
                    del self._writes[store.key]
                self.pending_bytes -= store.num_bytes
                self.stats.stored += is_stored
                self.stats.failed += not is_stored
                self._changed.notify_all()
            try:
                store.done(is_stored)
            except Exception:
                logger.exception("store callback failed")

    def _delete(self, keys: frozenset[Key]) -> None:
        for tier in self.tiers:
            try:
                tier.delete_many(keys, Deadline(PUT_SECONDS))
            except TierError as error:
                logger.warning("%d chunks could not be deleted from the tier %s: %s", len(keys), tier.name, error)
            except Exception:  # the writer thread must survive
                logger.exception("%d chunks could not be deleted from the tier %s", len(keys), tier.name)
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
                if entry is None:
                    return False
                is_stored &= store.key in tier.put_many({store.key: entry}, deadline)
            except TierFull as error:  # no failure, so no breaker logs it
                is_stored = False
                self._notices.warn(id(tier), f"the {tier.name} tier takes no chunks: {error}")
            except TierError as error:
                is_stored = False
                logger.debug("a chunk was not stored in the tier %s: %s", tier.name, error)
            except Exception:
                is_stored = False
                logger.exception("a chunk was not stored in the tier %s", tier.name)
        return is_stored
