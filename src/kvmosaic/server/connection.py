"""Connections of uvicorn, but those that wait for nothing do not stay open for ever."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 30.0


class Connection(H11Protocol):
    """Closes itself after 30 to 60 seconds without a request under way, also in the middle of a request's head.

    uvicorn only minds the time after a reply; whoever connects and sends nothing, or a letter a minute, would hold one
    of the process's file descriptors for good, and needs no key for that. With h11, a head has at most 64 KiB.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to look."""
        super().connection_made(transport)
        self._seen: object = None
        self._next_look = self.loop.call_later(IDLE_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Looks no more."""
        self._next_look.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP, and lets go of the request in whose body it stands.

        Whatever answers that request would send a second reply, which h11 refuses: a traceback in the log for each line
        of nonsense, and nobody needs a key to send it.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # a reply has begun, or was all that there will be
            self.transport.close()

    def _look(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is self._seen:  # nothing has happened since the last look
            self.transport.abort()
            return
        self._seen = self.cycle if is_idle else self
        self._next_look = self.loop.call_later(IDLE_SECONDS, self._look)
