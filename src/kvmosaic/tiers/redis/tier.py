"""RedisTier: entries in a Redis server that several processes may share, each in parts of a bounded size."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.errors import TierError, TierFull, TierUnavailable
from kvmosaic.tiers.redis import scripts
from kvmosaic.tiers.redis.link import (
    Command,
    OutOfTime,
    RedisLink,
    Refused,
    Session,
    cursor_and_names,
    integers,
    items,
    size_and_moment,
)
from kvmosaic.tiers.redis.scripts import MAX_PARTS
from kvmosaic.tiers.settings import RedisSettings
from kvmosaic.tiers.tier import (
    MAX_ENTRY_BYTES,
    MAX_KEY_BYTES,
    Deadline,
    Entry,
    EntryInfo,
    TierCounters,
    TierStat,
    check_size,
)

_WINDOW_BYTES = 2**23
"""Maximum bytes of parts in flight."""
_MANIFEST = re.compile(rb"kvm1 ([0-9a-f]{1,32}) ([0-9]{1,12}) ([0-9]{1,12})")

_T = TypeVar("_T")
_IDS_AT_ONCE = 256
_NAMES_AT_ONCE = 128
"""Names that one write scans for orphaned parts."""
_UNFINISHED_SECONDS = 60
_MAX_WRITE_SECONDS = 3600
_ID = re.compile(rf"([0-9a-f]{{2}}){{1,{MAX_KEY_BYTES}}}")
_FIRST = b"0"


class Parts:
    """The parts of one version of one entry: `<prefix>:{<id>}:<write>:<i>` for i from 0.

    Each is `part_bytes` long, but for the last one; an entry without bytes is one part without bytes.
    """

    def __init__(self, prefix: str, key: Key, write: str, num_bytes: int, part_bytes: int) -> None:
        self.key = key
        self.entry_id = key.hex()
        self.write = write
        self.num_bytes = num_bytes
        self.part_bytes = part_bytes
        self.num_parts = max(1, math.ceil(num_bytes / part_bytes))
        self._stem = f"{prefix}:{{{self.entry_id}}}:{write}:"

    @classmethod
    def new(cls, prefix: str, key: Key, num_bytes: int, part_bytes: int) -> Parts:
        """Parts with a new unique id; larger than asked for if there were too many."""
        part_bytes = max(part_bytes, math.ceil(num_bytes / MAX_PARTS))
        return cls(prefix, key, secrets.token_hex(8), num_bytes, part_bytes)

    @classmethod
    def from_manifest(cls, prefix: str, key: Key, manifest: object) -> Parts | None:
        """Parts of a manifest; None if it is none, or one that we would not write."""
        match = _MANIFEST.fullmatch(manifest) if isinstance(manifest, bytes) else None
        if match is None or int(match[2]) > MAX_ENTRY_BYTES or int(match[3]) < 1:
            return None
        return cls(prefix, key, match[1].decode(), int(match[2]), int(match[3]))

    def put(self, session: Session, entry: memoryview, seconds: int) -> None:
        """Writes all parts, which expire after so many seconds."""
        size = self.part_bytes
        for some in self._windows():
            session.ask(*(("SET", f"{self._stem}{i}", entry[i * size : (i + 1) * size], "EX", seconds) for i in some))

    def get(self, session: Session, max_bytes: int | None = None) -> bytearray | None:
        """Reads the entry, or its first `max_bytes`; None if a part is missing or has the wrong length.

        Reads at most one excess byte of a part that grew meanwhile.
        """
        wanted = self.num_bytes if max_bytes is None else min(max_bytes, self.num_bytes)
        entry = bytearray(wanted)
        for some in self._windows(max(1, math.ceil(wanted / self.part_bytes))):
            sizes = [min(self.part_bytes, wanted - i * self.part_bytes) for i in some]
            commands = (("GETRANGE", f"{self._stem}{i}", 0, size) for i, size in zip(some, sizes, strict=True))
            for i, size, part in zip(some, sizes, session.ask(*commands), strict=True):
                start = i * self.part_bytes
                is_cut = start + size < self.num_bytes and size < self.part_bytes
                if not isinstance(part, bytes) or len(part) != size + is_cut:
                    return None
                entry[start : start + size] = memoryview(part)[:size]
        return entry

    def _windows(self, num_parts: int | None = None) -> Iterator[Sequence[int]]:
        num_parts = self.num_parts if num_parts is None else num_parts
        return slices(range(num_parts), max(1, _WINDOW_BYTES // self.part_bytes))


def slices(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """The items in order, up to `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


logger = logging.getLogger("kvmosaic")


class RedisTier:
    """Redis tier: entries in parts, with a manifest that is written last.

        put:  make ROOM ─▶ SET part 0, 1, … (with TTL) ─▶ COMMIT: all parts there? replace the manifest, keep them
        get:  LOOK: the manifest, if all parts are there; counts as a use ─▶ GET part 0, 1, …

    An interrupted write is never visible, and its parts expire; parts of entries whose manifest is
    gone are removed step by step, with every write. A server that accepts no writes is still read. A malformed reply is
    a miss, or a failed write. With a quota, our scripts count bytes and evict the least recently used entries; without,
    Redis' own `maxmemory-policy` decides, and an entry of which Redis evicted any part is a miss. A single server (or a
    proxy that looks like one): the scripts touch names of many entries, so in a Redis Cluster all of them must share a
    hash slot (see `RedisSettings.prefix`).
    """

    name = "redis"
    is_persistent = True

    def __init__(self, settings: RedisSettings | None = None) -> None:
        """Opens no connection yet."""
        self.settings = settings or RedisSettings()
        self._link = RedisLink(self.settings)
        self._quota = self.settings.quota_bytes or 0
        self._tally = TierCounters()
        self._lock = threading.Lock()
        self._num_entries = self._num_bytes = 0
        self._unfinished: deque[Parts] = deque(maxlen=1024)
        self._cursor = _FIRST
        """Cursor of the scan for orphaned parts."""
        self._is_closed = False

    @classmethod
    def from_url(cls, url: str) -> RedisTier:
        """See `RedisSettings.from_url`."""
        return cls(RedisSettings.from_url(url))

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """See `Tier.put_many`."""
        views = {key: memoryview(entry).cast("B") for key, entry in entries.items()}
        most = min(self._quota or MAX_ENTRY_BYTES, MAX_ENTRY_BYTES)
        writes = [
            Parts.new(self.settings.prefix, key, len(view), self.settings.part_bytes)
            for key, view in views.items()
            if len(view) <= most
        ]
        stored: set[Key] = set()

        def put(session: Session) -> None:
            self._cancel_unfinished(session)
            self._collect(session)
            for write in writes:
                try:
                    if self._quota:
                        gone = self._script(session, scripts.ROOM, write.entry_id, write.num_bytes, self._quota)
                        self._tally.count(evictions=(integers([gone], 1) or [0])[0])
                    write.put(session, views[write.key], _seconds(deadline))
                    if self._commit(session, write):
                        stored.add(write.key)
                except BaseException:
                    self._unfinished.append(write)
                    raise

        try:
            self._run(deadline, put)
        except TierFull:
            with contextlib.suppress(TierUnavailable):  # a later write removes the parts
                self._run(Deadline(self.settings.pause_seconds), self._cancel_unfinished)
            raise
        return stored

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        """See `Tier.get_many`."""
        found: dict[Key, Entry] = {}
        sizes: dict[Key, int] = {}

        def read(session: Session, parts: Parts) -> bytearray | None:
            sizes[parts.key] = parts.num_bytes
            return None if max_bytes is not None and parts.num_bytes > max_bytes else parts.get(session)

        def get(session: Session) -> None:
            for key, parts in self._look(session, list(keys), is_use=True).items():
                entry = read(session, parts)
                if entry is None and (again := self._look(session, [key], is_use=True)):
                    entry = read(session, again[key])  # it was replaced during the read
                if entry is not None:
                    found[key] = entry

        self._run(deadline, get)
        for key in sizes.keys() - found.keys():
            check_size(key, sizes[key], max_bytes)
        num_bytes = sum(len(entry) for entry in found.values())
        self._tally.count(hits=len(found), misses=len(set(keys)) - len(found), get_bytes=num_bytes)
        return found

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.exists_many`."""
        found: set[Key] = set()
        self._run(deadline, lambda session: found.update(self._look(session, list(keys), is_use=False)))
        return found

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.delete_many`."""
        found: set[Key] = set()

        def delete(session: Session) -> None:
            for some in slices(list(keys), _IDS_AT_ONCE):
                sizes, *totals = items(self._script(session, scripts.DELETE, *(key.hex() for key in some)), 3)
                removed = zip(some, integers(sizes, len(some)) or (), strict=False)
                gone = {key: size for key, size in removed if size >= 0}
                found.update(gone)
                self._settle(totals, -len(gone), -sum(gone.values()))

        self._run(deadline, delete)
        return found

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """See `Tier.touch`."""
        self._run(deadline, lambda session: self._look(session, list(keys), is_use=True))

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """Deletes the entry: Redis memory is for usable entries."""
        if self.delete_many([key], deadline):
            self._tally.count(quarantined=1)
            logger.warning("deleted entry %s from %s: %s", key.hex(), self.settings.address, reason)

    def scan(self, deadline: Deadline) -> Iterator[EntryInfo]:
        """See `Tier.scan`; also corrects the counts, if others removed entries or Redis evicted some."""
        seen: set[Key] = set()
        num_bytes = 0
        for over_index in (False, True) if self._quota else (False,):
            cursor = _FIRST
            while True:
                step = self._run(deadline, partial(self._scan_step, cursor, over_index))
                if step is None:
                    return
                cursor, infos = step
                for info in infos:
                    if info.key not in seen:
                        seen.add(info.key)
                        num_bytes += info.num_bytes
                        yield info
                if cursor == _FIRST:
                    break
        if not self._quota:
            with self._lock:
                self._num_entries, self._num_bytes = len(seen), num_bytes

    def peek(self, key: Key, num_bytes: int, deadline: Deadline) -> Entry | None:
        """See `Peeking.peek`."""

        def get(session: Session) -> bytearray | None:
            parts = self._look(session, [key], is_use=False).get(key)
            return None if parts is None else parts.get(session, num_bytes)

        entry = self._run(deadline, get)
        return None if entry is None else memoryview(entry)[:num_bytes]

    def stat(self) -> TierStat:
        """See `Tier.stat`. With a quota, entries of all processes as of the last change."""
        with self._lock:
            num_entries, num_bytes = self._num_entries, self._num_bytes
        return TierStat(
            name=self.name,
            address=self.settings.address,
            num_entries=num_entries,
            num_bytes=num_bytes,
            quota_bytes=self.settings.quota_bytes,
            **self._tally.counts(),
        )

    def close(self) -> None:
        """Closes all connections."""
        self._is_closed = True
        self._link.close()

    def _commit(self, session: Session, write: Parts) -> bool:
        parts = (write.entry_id, write.write, write.num_bytes, write.part_bytes)
        answer = integers(self._script(session, scripts.COMMIT, *parts, self._quota), 5)
        if answer is None or answer[0] not in (0, 1):
            self._unfinished.append(write)  # stored or not, removing its parts is safe
            return False
        is_stored, evicted, before, *totals = answer
        num_bytes = is_stored * write.num_bytes
        self._settle(totals, is_stored - (before >= 0), num_bytes - max(0, before))
        self._tally.count(evictions=evicted, puts=is_stored, put_bytes=num_bytes)
        return bool(is_stored)

    def _cancel_unfinished(self, session: Session) -> None:
        writes: list[Parts] = []
        with contextlib.suppress(IndexError):  # that was all, or another thread took the rest
            while len(writes) < _IDS_AT_ONCE:
                writes.append(self._unfinished.popleft())
        if not writes:
            return
        arguments: list[str | int] = []
        for write in writes:
            arguments += [write.entry_id, write.write, write.num_parts]
        try:
            self._settle(self._script(session, scripts.CANCEL, *arguments))
        except BaseException:  # done or not, a retry is safe
            self._unfinished.extendleft(reversed(writes))
            raise

    def _look(self, session: Session, keys: Sequence[Key], *, is_use: bool) -> dict[Key, Parts]:
        found: dict[Key, Parts] = {}
        for some in slices(keys, _IDS_AT_ONCE):
            ids = [key.hex() for key in some]
            try:
                manifests = self._script(session, scripts.LOOK, int(is_use), *ids)
            except Refused:  # it writes: uses, and removals of incomplete entries
                manifests = self._script(session, scripts.FIND, *ids)
            for key, manifest in zip(some, items(manifests, len(some)), strict=True):
                if parts := Parts.from_manifest(self.settings.prefix, key, manifest):
                    found[key] = parts
        return found

    def _scan_step(self, cursor: bytes, over_index: bool, session: Session) -> tuple[bytes, list[EntryInfo]]:
        prefix = self.settings.prefix
        command: Command = ("SCAN", cursor, "MATCH", f"{prefix}:{{*}}", "COUNT", 1000)
        if over_index:
            command = ("ZSCAN", f"{prefix}:used", cursor, "COUNT", 1000)
        cursor, names = cursor_and_names(session.ask(command)[0])
        texts = [str(name, "ascii", "replace") for name in (names[::2] if over_index else names)]
        if not over_index:
            texts = [text[len(prefix) + 2 : -1] for text in texts]
        infos = []
        groups = list(slices([text for text in texts if _ID.fullmatch(text)], _IDS_AT_ONCE))
        for ids in groups or ([[]] if cursor == _FIRST else []):  # at its end, also for the totals
            found, *totals = items(self._script(session, scripts.RECONCILE, self._quota, *ids), 3)
            self._settle(totals)
            infos += [
                EntryInfo(Key(bytes.fromhex(entry_id)), num_bytes, micros / 1e6)
                for entry_id, (num_bytes, micros) in zip(ids, map(size_and_moment, items(found, len(ids))), strict=True)
                if num_bytes >= 0
            ]
        return cursor, infos

    def _collect(self, session: Session) -> None:
        """Scans some more names, and removes orphaned parts."""
        with contextlib.suppress(Refused):  # then the write itself is refused, too, and reports why
            cursor, gone = items(self._script(session, scripts.COLLECT, self._cursor, _NAMES_AT_ONCE), 2)
            self._cursor, _ = cursor_and_names([cursor, []])
            if type(gone) is int and gone > 0:
                logger.info("removed %d parts from %s that no entry has any more", gone, self.settings.address)

    def _script(self, session: Session, script: str, *arguments: str | bytes | int) -> Any:
        return session.ask(("EVAL", script, 1, self.settings.prefix, *arguments))[0]

    def _run(self, deadline: Deadline, work: Callable[[Session], _T]) -> _T | None:
        """What `work` returns; None if it timed out."""
        if self._is_closed:
            raise TierUnavailable(f"the redis tier at {self.settings.address} is closed")
        try:
            with self._link.session(deadline) as session:
                return work(session)
        except OutOfTime:
            return None
        except TierError:
            self._tally.count(failures=1)
            raise

    def _settle(self, totals: object, entries: int = 0, num_bytes: int = 0) -> None:
        """Records the totals: with a quota from Redis, else from this process's changes."""
        with self._lock:
            if self._quota:
                self._num_bytes, self._num_entries = integers(totals, 2) or (self._num_bytes, self._num_entries)
            else:
                self._num_entries = max(0, self._num_entries + entries)
                self._num_bytes = max(0, self._num_bytes + num_bytes)


def _seconds(deadline: Deadline) -> int:
    """Expiry of unfinished parts: a while longer than they may still be written."""
    return math.ceil(min(deadline.remaining, _MAX_WRITE_SECONDS)) + _UNFINISHED_SECONDS
