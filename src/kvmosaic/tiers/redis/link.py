"""RedisLink: connections to one Redis server, with a deadline on every wait; and its replies, validated before use."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from kvmosaic.errors import InvalidConfig, TierFull, TierUnavailable
from kvmosaic.tiers.settings import RedisSettings
from kvmosaic.tiers.tier import Deadline

try:
    import redis
    from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
except ModuleNotFoundError as error:
    raise InvalidConfig("a redis tier needs the package redis; pip install 'kvmosaic[tiers]'") from error

Command: TypeAlias = tuple[str | bytes | int | memoryview, ...]

Refused: TypeAlias = redis.ResponseError
"""The server understood a command and refused it: it accepts no writes now, or others wrote under our names."""

_SEND_BYTES = 2**18
_RECEIVE_BYTES = 2**18
_FAIR_SECONDS = 0.02
"""With a shorter deadline, a dead server cannot be distinguished from a busy one."""


class OutOfTime(Exception):
    """The deadline ended a wait."""


class Waits(threading.local):
    """Per-thread wait limits for a silent server: the pause, and never beyond the deadline."""

    def __init__(self, pause_seconds: float) -> None:
        self.pause_seconds = pause_seconds
        self.deadline = Deadline()

    def next_seconds(self, at_most: float) -> float:
        """Limit of the next wait in seconds."""
        remaining = self.deadline.remaining
        if remaining <= 0.0:
            raise TimeoutError
        return min(at_most, remaining)


class _WaitingSocket:
    """A socket with a timeout set before every wait.

    A timeout on whole commands would fail a large value on a slow connection; a fixed socket timeout would let a server
    that sends one byte at a time block a caller indefinitely.
    """

    def __init__(self, inner: socket.socket, waits: Waits) -> None:
        self._inner = inner
        self._waits = waits

    def recv(self, num_bytes: int) -> bytes:
        if self._inner.gettimeout() != 0.0:  # 0.0: non-blocking check for data
            self._inner.settimeout(self._waits.next_seconds(self._waits.pause_seconds))
        return self._inner.recv(num_bytes)

    def sendall(self, data: bytes | memoryview) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            self._inner.settimeout(self._waits.next_seconds(self._waits.pause_seconds))
            rest = rest[self._inner.send(rest[:_SEND_BYTES]) :]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Waiting:
    """Mixin: makes connections of redis-py use `_WaitingSocket`."""

    def __init__(self, *, waits: Waits, connect_seconds: float, **options: Any) -> None:
        self._waits = waits
        self._connect_seconds = connect_seconds
        super().__init__(**options)

    def _connect(self) -> Any:
        self.socket_connect_timeout = self._waits.next_seconds(self._connect_seconds)
        self.socket_timeout = self._waits.next_seconds(self._waits.pause_seconds)
        return _WaitingSocket(super()._connect(), self._waits)  # type: ignore[misc]  # of the class it is mixed into


class Session:
    """One borrowed connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.has_answered = False
        """Whether the server has answered anything in this session."""

    def ask(self, *commands: Command) -> list[Any]:
        """Pipelines all commands and returns their replies; the first error is raised after all have replied."""
        self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        replies, failure = [], None
        for _ in commands:
            try:
                replies.append(self._connection.read_response())
            except redis.ResponseError as error:
                failure = failure or error
            self.has_answered = True
        if failure is not None:
            raise failure
        return replies


class RedisLink:
    """Connection pool of one server; connections are opened on demand, and any thread may borrow one."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings = settings
        self._waits = Waits(settings.pause_seconds)
        self._free = threading.BoundedSemaphore(settings.max_connections)
        options: dict[str, Any] = {"db": settings.db, "protocol": 2, "driver_info": None}
        options |= {"waits": self._waits, "connect_seconds": settings.connect_seconds}
        options |= {"socket_read_size": _RECEIVE_BYTES, "max_connections": settings.max_connections}
        if settings.password:
            options |= {"username": settings.username or None, "password": settings.password}
        kind: type[Any] = SSLConnection if settings.tls else Connection
        if settings.path:
            kind = UnixDomainSocketConnection
            options["path"] = settings.path
        else:
            options |= {"host": settings.host, "port": settings.port}
        if settings.tls and settings.ca_file:
            options["ssl_ca_certs"] = settings.ca_file
        self._pool = ConnectionPool(connection_class=type(f"Waiting{kind.__name__}", (_Waiting, kind), {}), **options)

    @contextlib.contextmanager
    def session(self, deadline: Deadline) -> Iterator[Session]:
        """Borrows a connection until the deadline, even if the server is still answering then.

        Raises:
            OutOfTime: the deadline ended it; the server had answered, or had no time to.
            TierUnavailable: no answer, or one that means the server is unavailable. TierFull: out of memory.
        """
        self._waits.deadline = deadline
        if deadline.has_passed or not self._free.acquire(timeout=min(deadline.remaining, threading.TIMEOUT_MAX)):
            raise OutOfTime
        connection: Any = None
        session = None
        start = time.monotonic()
        try:
            connection = self._pool.get_connection()
            session = Session(connection)
            yield session
        except (redis.RedisError, OSError) as error:
            if connection is not None and not isinstance(error, redis.ResponseError):
                connection.disconnect()
            was_fair = time.monotonic() - start >= _FAIR_SECONDS
            has_answered = session is not None and session.has_answered
            if _is_timeout(error) and deadline.has_passed and (has_answered or not was_fair):
                raise OutOfTime from error
            raise self._explain(error) from error
        except BaseException:
            if connection is not None:
                connection.disconnect()  # unread replies may be in flight
            raise
        finally:
            self._waits.deadline = Deadline()
            if connection is not None:
                self._pool.release(connection)
            self._free.release()

    def close(self) -> None:
        """Closes all connections; those in use fail."""
        self._pool.disconnect()

    def _explain(self, error: Exception) -> TierUnavailable | TierFull:
        text = str(error)
        if isinstance(error, redis.OutOfMemoryError):
            return TierFull(
                f"{self.settings.address} has no memory left ({text}); raise its maxmemory or lower our quota"
            )
        if isinstance(error, redis.AuthenticationError) or "NOAUTH" in text or "WRONGPASS" in text:
            why = f"does not let us in ({text}); check user name and password of its URL"
        elif isinstance(error, redis.ReadOnlyError):
            why = f"is a read-only replica ({text}); give the address of the primary"
        elif isinstance(error, redis.exceptions.MovedError | redis.exceptions.AskError):
            why = f"is part of a Redis Cluster ({text}); give a single server"
        elif isinstance(error, redis.BusyLoadingError):
            why = f"is still loading its data ({text})"
        elif "compil" in text:
            why = f"cannot run our scripts ({text}); Redis 7.0, Valkey 7.2 or newer is needed"
        elif _is_timeout(error):
            why = f"does not answer ({text or 'no time left'})"
        else:
            why = f"fails: {text}"
        return TierUnavailable(f"{self.settings.address} {why}")


def _is_timeout(error: Exception) -> bool:
    return isinstance(error, TimeoutError | redis.TimeoutError)


def integers(reply: object, count: int) -> list[int] | None:
    """A reply of `count` integers; None for anything else."""
    if isinstance(reply, list) and len(reply) == count and all(type(number) is int for number in reply):
        return reply
    return None


def items(reply: object, count: int) -> Sequence[Any]:
    """A reply of `count` items of any kind; `count` times None for anything else."""
    return reply if isinstance(reply, list) and len(reply) == count else [None] * count


def cursor_and_names(reply: object) -> tuple[bytes, list[bytes]]:
    """Result of a scan step; the end, and no names, for anything else."""
    cursor, names = items(reply, 2)
    if not isinstance(cursor, bytes) or not cursor.isdigit() or not isinstance(names, list):
        return b"0", []
    return cursor, [name if isinstance(name, bytes) else b"" for name in names]


def size_and_moment(reply: object) -> tuple[int, float]:
    """Bytes of an entry (-1: absent), and the microsecond of its last use (0.0: unknown)."""
    num_bytes, moment = items(reply, 2)
    try:
        micros = float(moment)
    except (TypeError, ValueError, OverflowError):
        micros = 0.0
    return num_bytes if type(num_bytes) is int else -1, micros if math.isfinite(micros) else 0.0
