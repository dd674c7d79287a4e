"""Connections of uvicorn with an idle timeout, also in the middle of a request head."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 30.0


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
