"""Redis tier: entries in a server that several processes share, each a hash of parts of a bounded size."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.errors import InvalidConfig, TierError, TierFull, TierUnavailable, pip_install
from kvmosaic.tiers.settings import RedisSettings
from kvmosaic.tiers.tier import (
    MAX_ENTRY_BYTES,
    Deadline,
    Entry,
    TierCounters,
    TierStat,
    check_size,
)

try:
    import redis
    from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
except ModuleNotFoundError as error:
    raise InvalidConfig(f"a redis tier needs the package redis; {pip_install('tiers')}") from error

Command: TypeAlias = tuple[str | bytes | int | memoryview, ...]

Refused: TypeAlias = redis.ResponseError
"""The server understood a command and refused it: it accepts no writes now, or not from us."""

_SEND_BYTES = 2**16
"""As much is sent at a time: each has the whole pause, so that a large value does not fail on a slow connection."""
_RECEIVE_BYTES = 2**18
_FAIR_SECONDS = 0.02
"""With a shorter deadline, a dead server cannot be distinguished from a busy one."""


class OutOfTime(Exception):
    """The deadline ended a call."""


class Session:
    """One borrowed connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.has_answered = False
        """Whether the server has answered anything in this session."""

    def ask(self, *commands: Command) -> list[Any]:
        """Pipelines all commands and returns their replies; the first error is raised after all have replied.

        A reply is None where another type of value, which others wrote, is under one of our names.
        """
        packed = [memoryview(piece) for piece in self._connection.pack_commands(commands)]
        pieces = (piece[i : i + _SEND_BYTES] for piece in packed for i in range(0, len(piece), _SEND_BYTES))
        self._connection.send_packed_command(pieces, check_health=False)
        replies, failure = [], None
        for _ in commands:
            try:
                replies.append(self._connection.read_response())
            except redis.ResponseError as error:
                replies.append(None)
                if not str(error).startswith("WRONGTYPE"):
                    failure = failure or error
            self.has_answered = True
        if failure is not None:
            raise failure
        return replies


class RedisLink:
    """Connection pool of one server; connections are opened on demand, and any thread may borrow one."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self._free = threading.BoundedSemaphore(settings.max_connections)
        options: dict[str, Any] = {"db": settings.db, "protocol": 2, "driver_info": None}
        options |= {"socket_connect_timeout": settings.connect_seconds, "socket_timeout": settings.pause_seconds}
        options |= {"socket_read_size": _RECEIVE_BYTES, "max_connections": settings.max_connections}
        if settings.password:
            options |= {"username": settings.username or None, "password": settings.password}
        if settings.path:
            options |= {"connection_class": UnixDomainSocketConnection, "path": settings.path}
        else:
            options |= {"connection_class": SSLConnection if settings.tls else Connection}
            options |= {"host": settings.host, "port": settings.port}
        if settings.tls:
            options["ssl_ca_certs"] = settings.ca_file
        self._pool = ConnectionPool(**options)

    @contextlib.contextmanager
    def session(self, deadline: Deadline) -> Iterator[Session]:
        """Borrows a connection until the deadline, which shuts it down even if the server is still answering then.

        Raises:
            OutOfTime: the deadline ended it; the server had answered, or had no time to.
            TierUnavailable: no answer, or one that means the server is unavailable. TierFull: out of memory.
        """
        if deadline.has_passed or not self._free.acquire(timeout=min(deadline.remaining, threading.TIMEOUT_MAX)):
            raise OutOfTime
        connection: Any = None
        session = timer = None
        start = time.monotonic()
        try:
            connection = self._pool.get_connection()
            session = Session(connection)
            seconds = min(deadline.remaining, threading.TIMEOUT_MAX)
            timer = threading.Timer(seconds, _shut_down, (connection._sock,))
            timer.daemon = True
            timer.start()
            yield session
        except BaseException as error:
            if connection is not None:
                connection.disconnect()  # it may watch a name, or have unread replies
            if not isinstance(error, redis.RedisError | OSError):
                raise
            is_late = deadline.has_passed and not isinstance(error, redis.ResponseError)
            was_fair = time.monotonic() - start >= _FAIR_SECONDS
            if is_late and (not was_fair or (session is not None and session.has_answered)):
                raise OutOfTime from error
            raise self._explain(TimeoutError() if is_late else error) from error
        finally:
            if timer is not None:
                timer.cancel()
            if connection is not None:
                if deadline.has_passed:
                    connection.disconnect()  # the timer may be about to do so
                self._pool.release(connection)
            self._free.release()

    def close(self) -> None:
        """Closes all connections; those in use fail."""
        self._pool.disconnect()

    def _explain(self, error: Exception) -> TierUnavailable | TierFull:
        text = str(error)
        if isinstance(error, redis.OutOfMemoryError):
            return TierFull(
                f"{self.settings.address} has no memory left ({text}); raise its maxmemory, or set its "
                "maxmemory-policy to allkeys-lru"
            )
        if isinstance(error, redis.AuthenticationError) or "NOAUTH" in text or "WRONGPASS" in text:
            why = f"does not let us in ({text}); check user name and password of its URL"
        elif isinstance(error, redis.ReadOnlyError):
            why = f"is a read-only replica ({text}); give the address of the primary"
        elif isinstance(error, redis.exceptions.MovedError | redis.exceptions.AskError):
            why = f"is part of a Redis Cluster ({text}); give a single server"
        elif isinstance(error, redis.BusyLoadingError):
            why = f"is still loading its data ({text})"
        elif isinstance(error, TimeoutError | redis.TimeoutError):
            why = f"does not answer ({text or 'no time left'})"
        else:
            why = f"fails: {text}"
        return TierUnavailable(f"{self.settings.address} {why}")


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed already
        socket.socket.shutdown(connected, socket.SHUT_RDWR)


_T = TypeVar("_T")
_MAX_PARTS = 2**16
_MAX_PART_BYTES = 2**28
_WINDOW_BYTES = 2**23
"""Maximum bytes of parts in flight."""
_KEYS_AT_ONCE = 256
_DRAFT_SECONDS = 60
"""A draft expires if no part of it is written for so long."""
_VERSION = "version"
_VERSION_BYTES = 32
"""A number at random, and the bytes of the entry, in hex."""

logger = logging.getLogger("kvmosaic")


@dataclass(frozen=True, slots=True)
class Parts:
    """How an entry is cut: parts of `part_bytes`, but for the last one; one without bytes if the entry has none."""

    num_bytes: int
    num_parts: int
    part_bytes: int

    @classmethod
    def of(cls, num_bytes: int, part_bytes: int) -> Parts:
        """Cuts an entry; into larger parts than asked for if there were too many."""
        part_bytes = max(part_bytes, math.ceil(num_bytes / _MAX_PARTS))
        return cls(num_bytes, max(1, math.ceil(num_bytes / part_bytes)), part_bytes)

    @classmethod
    def found(cls, num_parts: int, lengths: Sequence[object]) -> Parts | None:
        """Parts of a hash with these lengths of its version, first and last part; None if we would not write it."""
        version, first, last = (length if type(length) is int else -1 for length in lengths)
        num_bytes = (num_parts - 1) * first + last
        is_ours = version == _VERSION_BYTES and (num_parts == 1 or last > 0) and 0 <= last <= first <= _MAX_PART_BYTES
        return cls(num_bytes, num_parts, max(1, first)) if is_ours and num_bytes <= MAX_ENTRY_BYTES else None

    def windows(self) -> Iterator[Sequence[tuple[str, slice]]]:
        """The parts, a few megabytes at a time: their fields, and where each belongs."""
        size, count = self.part_bytes, self.num_parts
        parts = [(f"{i}/{count}", slice(i * size, min((i + 1) * size, self.num_bytes))) for i in range(count)]
        return slices(parts, max(1, _WINDOW_BYTES // size))


def slices(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    """The items in order, up to `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _items(reply: object, count: int) -> Sequence[Any]:
    """A reply of `count` items of any kind; `count` times None for anything else."""
    return reply if isinstance(reply, list) and len(reply) == count else [None] * count


class RedisTier:
    """Redis tier: an entry is a hash, written under another name and renamed at the end.

        <prefix>:{<key in hex>}             version; 0/3, 1/3, 2/3: the parts of the entry
        <prefix>:{<key in hex>}:<version>   a draft: the same, while it is written; expires

    Redis renames, evicts and deletes a hash as a whole; the names of its parts tell whether one is missing. A read
    checks lengths before it reads anything, in a transaction that fails if the hash changes, and that all parts are of
    one version. A server that accepts no writes is still read. A malformed reply is a miss, or a failed write. Redis'
    `maxmemory` and `maxmemory-policy` decide what is evicted.
    """

    name = "redis"
    is_persistent = True

    def __init__(self, settings: RedisSettings | None = None) -> None:
        """Opens no connection yet."""
        self.settings = settings or RedisSettings()
        self._link = RedisLink(self.settings)
        self._tally = TierCounters()
        self._is_closed = False

    @classmethod
    def from_url(cls, url: str) -> RedisTier:
        """See `RedisSettings.from_url`."""
        return cls(RedisSettings.from_url(url))

    def put_many(self, entries: Mapping[Key, Entry], deadline: Deadline) -> set[Key]:
        """See `Tier.put_many`."""
        stored: set[Key] = set()

        def put(session: Session) -> None:
            for key, entry in entries.items():
                view = memoryview(entry).cast("B")
                if len(view) <= MAX_ENTRY_BYTES and self._write(session, key, view):
                    stored.add(key)
                    self._tally.count(puts=1, put_bytes=len(view))

        self._run(deadline, put)
        return stored

    def get_many(self, keys: Collection[Key], deadline: Deadline, *, max_bytes: int | None = None) -> dict[Key, Entry]:
        """See `Tier.get_many`."""
        found: dict[Key, Entry] = {}
        sizes: dict[Key, int] = {}
        most = MAX_ENTRY_BYTES if max_bytes is None else max_bytes

        def get(session: Session) -> None:
            wanted = set(keys)
            for _ in range(2):  # again what was replaced during the read
                for key, parts in self._look(session, wanted).items():
                    sizes[key] = parts.num_bytes
                    if sizes[key] <= most and (entry := self._read(session, key, parts)) is not None:
                        found[key] = entry
                wanted = {key for key in sizes.keys() - found.keys() if sizes[key] <= most}
                if not wanted:
                    return
            with contextlib.suppress(Refused):
                self._delete(session, wanted)  # what stays unreadable must not pass for stored

        self._run(deadline, get)
        for key in sizes.keys() - found.keys():
            check_size(key, sizes[key], max_bytes)
        num_bytes = sum(len(entry) for entry in found.values())
        self._tally.count(hits=len(found), misses=len(set(keys)) - len(found), get_bytes=num_bytes)
        return found

    def exists_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.exists_many`."""
        found: set[Key] = set()
        self._run(deadline, lambda session: found.update(self._look(session, keys)))
        return found

    def delete_many(self, keys: Collection[Key], deadline: Deadline) -> set[Key]:
        """See `Tier.delete_many`."""
        return self._run(deadline, lambda session: self._delete(session, keys)) or set()

    def touch(self, keys: Collection[Key], deadline: Deadline) -> None:
        """See `Tier.touch`."""
        self._run(deadline, lambda session: session.ask(*(("TOUCH", self._name(key)) for key in keys)))

    def quarantine(self, key: Key, reason: str, deadline: Deadline) -> None:
        """Deletes the entry: Redis memory is for usable entries."""
        if self.delete_many([key], deadline):
            self._tally.count(quarantined=1)
            logger.warning("deleted entry %s from %s: %s", key.hex(), self.settings.address, reason)

    def stat(self) -> TierStat:
        """See `Tier.stat`."""
        return TierStat(self.name, self.settings.address, None, None, None, **self._tally.counts())

    def close(self) -> None:
        """Closes all connections."""
        self._is_closed = True
        self._link.close()

    def _name(self, key: Key) -> str:
        return f"{self.settings.prefix}:{{{key.hex()}}}"

    def _look(self, session: Session, keys: Iterable[Key]) -> dict[Key, Parts]:
        """Present entries, by the number of their fields and the lengths of three; nothing of unknown size is read."""
        found: dict[Key, Parts] = {}
        for some in slices(list(keys), _KEYS_AT_ONCE):
            counts = zip(some, session.ask(*(("HLEN", self._name(key)) for key in some)), strict=True)
            asked = [(key, n - 1) for key, n in counts if type(n) is int and 1 < n <= _MAX_PARTS + 1]
            fields = [(key, name) for key, n in asked for name in (_VERSION, f"0/{n}", f"{n - 1}/{n}")]
            lengths = session.ask(*(("HSTRLEN", self._name(key), name) for key, name in fields))
            for (key, n), three in zip(asked, slices(lengths, 3), strict=True):
                if parts := Parts.found(n, three):
                    found[key] = parts
        return found

    def _read(self, session: Session, key: Key, parts: Parts) -> bytearray | None:
        """A whole entry; None if one is missing or of another length, or the entry changes."""
        name, entry, first = self._name(key), bytearray(), None
        for some in parts.windows():
            fields = [_VERSION, *(field for field, _ in some)]
            sizes = [_VERSION_BYTES, *(place.stop - place.start for _, place in some)]
            lengths = session.ask(("WATCH", name), *(("HSTRLEN", name, field) for field in fields))[1:]
            if lengths != sizes:
                session.ask(("UNWATCH",))
                return None
            (values,) = _items(session.ask(("MULTI",), ("HMGET", name, *fields), ("EXEC",))[-1], 1)
            values = _items(values, len(fields))
            if [len(value) if isinstance(value, bytes) else None for value in values] != sizes:
                return None
            first = first or values[0]
            if values[0] != first or not first.endswith(b"%016x" % parts.num_bytes):
                return None
            for value in values[1:]:
                entry += value
        return entry

    def _write(self, session: Session, key: Key, entry: memoryview) -> bool:
        """Writes a draft and makes it the entry; False if some of it was evicted meanwhile."""
        name, parts = self._name(key), Parts.of(len(entry), self.settings.part_bytes)
        version = f"{secrets.token_hex(8)}{len(entry):016x}"
        draft = f"{name}:{version}"
        expiry = ("EXPIRE", draft, _DRAFT_SECONDS)
        num_fields: object = None
        try:
            for some in parts.windows():
                fields = [value for field, place in some for value in (field, entry[place])]
                command = ("HSET", draft, _VERSION, version, *fields)
                num_fields = session.ask(("MULTI",), command, expiry, ("EXEC",), ("HLEN", draft))[-1]
            if num_fields != parts.num_parts + 1:
                return False
            replies = session.ask(("MULTI",), ("RENAME", draft, name), ("PERSIST", name), ("EXEC",))
            return bool(_items(replies[-1], 2)[0] == b"OK")
        except Refused:
            with contextlib.suppress(Refused):
                session.ask(("UNLINK", draft))
            raise

    def _delete(self, session: Session, keys: Collection[Key]) -> set[Key]:
        replies = session.ask(*(("UNLINK", self._name(key)) for key in keys))
        return {key for key, reply in zip(keys, replies, strict=True) if reply == 1}

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
