"""RedisLink: connections to one Redis server, with a deadline for every call."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
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
