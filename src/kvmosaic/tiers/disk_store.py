"""The store of a disk tier: an entry folder, what is known of it, and its quota."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterable

from kvmosaic.cache.keys import Key
from kvmosaic.tiers.deadline import Deadline
from kvmosaic.tiers.disk_folder import EntryFolder, FileFacts
from kvmosaic.tiers.disk_names import shard_of
from kvmosaic.tiers.ledger import Ledger
from kvmosaic.tiers.tally import Tally
from kvmosaic.tiers.tier import MAX_ENTRY_BYTES

_UNSEEN = 1 / 16
"""Of the quota, what a process writes at most before it looks again at what others have written."""
_ASIDE = 1 / 16
"""Of the quota, what the quarantine may take on top of it."""


class DiskStore:
    """Entries in a folder, and a ledger that says who leaves.

        put:  draft ──written──▶ [ lock: oldest leave until it fits; then it gets its name ] ──▶ sync
        ledger: what is known of the folder        files: what is true, for every process

    Whether an entry is there is asked of the folder each time. So what another process writes is found, and what it
    removes is a miss. Before an entry leaves, its file tells when it was last used, by whomever.

    Other processes: each keeps to the quota by its own ledger, and lists the folder again before it has written more
    than a sixteenth of the quota since it last did. With N of them, entries take at most 1 + N / 16 times the quota,
    drafts not counted. All should have the same quota; otherwise the smallest counts.

    Reading, writing and waiting for the disk happen outside the lock; renaming, removing and listing one shard
    inside. So the ledger is exact for what only this process writes.

    Everything raises `OSError`.
    """

    def __init__(self, folder: EntryFolder, quota_bytes: int, tally: Tally, clock: Callable[[], int] = time.time_ns):
        self._folder = folder
        self._quota = quota_bytes
        self._tally = tally
        self._clock = clock
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._ledger = Ledger(clock)
        self._unseen_bytes = 0
        self._must_look = True
        self._to_see: dict[str, list[Key]] = {}

    @property
    def num_entries(self) -> int:
        """Entries in the ledger. Never waits: the lock may be held by a call that waits for the disk."""
        return len(self._ledger)

    @property
    def num_bytes(self) -> int:
        """Bytes of all entries in the ledger."""
        return self._ledger.num_bytes

    @property
    def most_bytes(self) -> int:
        """Of the largest entry that it takes or gives."""
        return min(self._quota, MAX_ENTRY_BYTES)

    def put(self, key: Key, entry: memoryview, deadline: Deadline) -> bool:
        """Stores an entry, not yet safe from a power failure; False if it took too long."""
        if not self.see_others(entry.nbytes, deadline):
            return False
        with self._lock:
            now = self._ledger.now()
        draft = self._folder.draft(key, entry, now, deadline)
        if draft is None:
            return False
        is_placed = False
        try:
            with self._lock:
                self._ledger.use(key, now)  # what is replaced must not leave to make room for itself
                if self._make_room(key, entry.nbytes, deadline):
                    self._folder.place(key, draft)
                    is_placed = True
                    self._ledger.add(key, entry.nbytes, now)
                    self._unseen_bytes += entry.nbytes
        finally:
            if not is_placed:
                self._folder.discard(key, draft)
        self._tally.count(puts=is_placed, put_bytes=entry.nbytes * is_placed)
        return is_placed

    def sync(self, keys: set[Key]) -> set[Key]:
        """Makes what was put safe from a power failure; returns what is still there."""
        self._folder.sync(keys)
        with self._lock:
            return {key for key in keys if key in self._ledger}

    def get(self, key: Key) -> bytes | None:
        """The entry, whole. One that the disk cannot read any more is put aside."""
        with self._lock:
            now = self._ledger.now()
        try:
            entry = self._folder.read(key, self.most_bytes, now)
        except OSError as error:
            if error.errno == errno.EIO:  # once: one bad spot must not make the whole tier fail again and again
                with contextlib.suppress(OSError):
                    self.put_aside(key)
            raise
        with self._lock:
            if entry is not None and self._ledger.size(key) == len(entry):
                self._ledger.use(key, now)
            elif entry is not None or key in self._ledger:
                self._refresh(key)
        return entry

    def start(self, key: Key, num_bytes: int) -> bytes | None:
        """The first bytes of an entry, which is not a use."""
        return self._folder.start(key, num_bytes, self.most_bytes)

    def exists(self, key: Key) -> bool:
        """Whether the entry is there now."""
        with self._lock:
            return self._refresh(key)

    def touch(self, key: Key) -> None:
        """Counts as a use."""
        with self._lock:
            self._folder.touch(key, self._ledger.now())
            self._refresh(key)

    def remove(self, key: Key) -> bool:
        """Removes an entry; returns whether there was one."""
        with self._lock:
            was_there = self._folder.remove(key)
            self._ledger.drop(key)
        return was_there

    def put_aside(self, key: Key) -> bool:
        """Moves an entry to the quarantine; returns whether there was one."""
        with self._lock:
            was_there = self._folder.put_aside(key, self._ledger.now(), int(self._quota * _ASIDE))
            self._ledger.drop(key)
        self._tally.count(quarantined=was_there)
        return was_there

    def trim(self, deadline: Deadline) -> None:
        """Lets entries leave until the quota is kept."""
        with self._lock:
            self._make_room(None, 0, deadline)

    def see_others(self, num_bytes: int, deadline: Deadline) -> bool:
        """Lists the folder if it is time to, before so many bytes are written; False if that took too long.

        What was not listed then is listed by the next call.
        """
        if not self._looking.acquire(blocking=False):
            return True
        try:
            with self._lock:
                is_time = self._must_look or self._unseen_bytes + num_bytes > self._quota * _UNSEEN
                if is_time and not self._to_see:
                    self._unseen_bytes = 0
                    self._must_look = True  # until it is done, also if it fails
            if is_time and not self._to_see:
                self._to_see = self.shards()
                self._must_look = False
            while self._to_see:
                if deadline.has_passed:
                    return False
                shard = next(iter(self._to_see))
                self.look_into(shard, self._to_see[shard])
                del self._to_see[shard]
            return True
        finally:
            self._looking.release()

    def shards(self) -> dict[str, list[Key]]:
        """All shards, each with the keys that are known of it."""
        with self._lock:
            known: dict[str, list[Key]] = {}
            for key in self._ledger:
                known.setdefault(shard_of(key), []).append(key)
        return {shard: known.get(shard, []) for shard in sorted(self._folder.shards() | known.keys())}

    def look_into(self, shard: str, known: Iterable[Key]) -> dict[Key, FileFacts]:
        """Lists a shard. What was known before and is still in the ledger, but not there, has gone."""
        with self._lock:
            found = self._folder.entries_in(shard, self._clock())
            for key in known:
                if key not in found:
                    self._ledger.drop(key)
            for key, facts in found.items():
                self._write_down(key, facts)
        return found

    def check_invariants(self) -> None:
        """Asserts what the class promises; for tests."""
        with self._lock:
            self._ledger.check_invariants()

    def _make_room(self, key: Key | None, num_bytes: int, deadline: Deadline) -> bool:
        """Lets entries leave until so many bytes fit in place of what is under the key; False if it took too long."""
        reprieves = len(self._ledger)
        while self._ledger.num_bytes - (self._ledger.size(key) if key else 0) + num_bytes > self._quota:
            oldest = self._ledger.oldest()
            if deadline.has_passed or oldest is None:
                return False
            line, facts = self._ledger.get(oldest), self._folder.facts(oldest)
            assert line is not None
            if facts is not None and facts.last_used > line.last_used and reprieves > 0:  # used by another process
                reprieves -= 1
                self._ledger.add(oldest, facts.num_bytes, facts.last_used)
                continue
            self._tally.count(evictions=self._folder.remove(oldest))
            self._ledger.drop(oldest)
        return True

    def _refresh(self, key: Key) -> bool:
        """Writes down what is true of an entry; returns whether it is there."""
        facts = self._folder.facts(key)
        self._write_down(key, facts)
        return facts is not None

    def _write_down(self, key: Key, facts: FileFacts | None) -> None:
        line = self._ledger.get(key)
        if facts is None:
            self._ledger.drop(key)
        elif line is None or line.num_bytes != facts.num_bytes or line.last_used < facts.last_used:
            self._ledger.add(key, facts.num_bytes, facts.last_used)
