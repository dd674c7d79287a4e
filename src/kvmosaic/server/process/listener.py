"""Listener of the server: its socket, its certificate, uvicorn with an idle timeout for connections; a trimmed heap."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvmosaic.errors import InvalidConfig
from kvmosaic.server.settings import ServerSettings


@contextlib.asynccontextmanager
async def trimmed_heap(seconds: float = 30.0) -> AsyncIterator[None]:
    """Two arenas for all threads, not eight a core; gives free pages back, which glibc keeps, while the block runs."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # of glibc
        libc.mallopt(-8, 2)  # M_ARENA_MAX
    task = asyncio.create_task(_trim_always(getattr(libc, "malloc_trim", None), seconds), name="heap-trim")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _trim_always(trim: Callable[[int], int] | None, seconds: float) -> None:
    while trim is not None:  # other C libraries have none
        await asyncio.sleep(seconds)
        await asyncio.to_thread(trim, 0)  # ctypes releases the interpreter's lock


BACKLOG = 2_048
IDLE_SECONDS = 30.0
UNREAD_SECONDS = 60
"""Timeout of a client that reads nothing although data is ready: its request must not stay forever."""
CLOSING_SECONDS = 5
"""Timeout to read replies, after running requests have ended or were aborted."""


class Listener(uvicorn.Server):
    """uvicorn without its signal handlers; the server has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no handlers."""
        yield


def listener_for(app: ASGIApp, settings: ServerSettings) -> Listener:
    """Returns a server of `app` that does not listen yet; reads the certificate.

    Raises:
        InvalidConfig: the certificate or its key cannot be used.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        root_path=settings.root_path,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        log_config=None,
        log_level=None,
        access_log=False,  # ours has the id of a request, how long it took, and why it was refused
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        names = f"--ssl-certfile {settings.ssl_certfile} with --ssl-keyfile {settings.ssl_keyfile}"
        raise InvalidConfig(f"{names} cannot be used: {error}; give a certificate and its key in PEM files") from None
    return Listener(config)


def listen(settings: ServerSettings) -> socket.socket:
    """Binds the address; connections wait in the backlog until they are served.

    Raises:
        InvalidConfig: the address is in use, unknown, or not permitted.
    """
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return _bound(found[0])
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else error  # errors of name resolution are negative
        raise InvalidConfig(f"cannot listen on {host} port {port}: {reason}; choose another --host or --port") from None


def _bound(found: tuple[int, int, int, str, tuple[object, ...]]) -> socket.socket:
    family, kind, _, _, address = found
    # asyncio sends small pieces at once (TCP_NODELAY) only on sockets that say they are TCP; those of
    # socket.create_server do not, and each token of a stream would wait 40 ms for the client's acknowledgement
    place = socket.socket(family, kind, socket.IPPROTO_TCP)
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
            place.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1_000)
        place.bind(address)
        place.listen(BACKLOG)
    except BaseException:
        place.close()
        raise
    return place


def address_of(settings: ServerSettings, place: socket.socket) -> str:
    """Returns the URL where clients reach the server."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{host}:{place.getsockname()[1]}{settings.root_path}"


class Connection(H11Protocol):
    """A connection that closes after 30 to 60 seconds without a request in progress, also in the middle of a head.

    uvicorn only times out after a reply. A client that connects and sends nothing, or a byte per minute, would hold a
    file descriptor forever, and needs no key for that. With h11, a head has at most 64 KiB.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the idle timer."""
        super().connection_made(transport)
        self._seen: object = None
        self._next_look = self.loop.call_later(IDLE_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the idle timer."""
        self._next_look.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuses malformed HTTP, and drops the request whose body contains it.

        The route of that request would send a second reply, which h11 refuses with a traceback in the log for each
        malformed line; sending one needs no key.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # a reply has begun, or is complete
            self.transport.close()

    def _look(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is self._seen:  # nothing has happened since the last check
            self.transport.abort()
            return
        self._seen = self.cycle if is_idle else self
        self._next_look = self.loop.call_later(IDLE_SECONDS, self._look)
