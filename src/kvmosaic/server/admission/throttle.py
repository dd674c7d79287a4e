"""Throttle: admits at most N requests per event-loop tick, so that a burst does not delay probes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

AT_ONCE = 2
"""Requests admitted per event-loop tick; each takes the loop a few milliseconds."""


class Throttle:
    """Admits `AT_ONCE` requests per event-loop tick, round-robin over tenants, FIFO within a tenant.

    A burst of one tenant does not delay the others. Without the limit, the first steps of a hundred requests would run
    as one piece: the loop polls for new requests only when all ready callbacks have run. Used on the event loop only.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant, the next tenant first."""
        self._num_let_in = 0
        self._is_turning = False

    async def enter(self, tenant: str) -> None:
        """Waits until this request of a tenant is admitted; safe to cancel."""
        loop = asyncio.get_running_loop()
        if not self._is_turning:
            self._is_turning = True
            loop.call_soon(self._turn, loop)
        if self._num_let_in < AT_ONCE and not self._waiting:
            self._num_let_in += 1
            return
        place = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        await place

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs once per event-loop tick while requests arrive."""
        self._is_turning = bool(self._num_let_in or self._waiting)
        self._num_let_in = 0
        while self._waiting and self._num_let_in < AT_ONCE:
            tenant, places = next(iter(self._waiting.items()))
            place = places.popleft()
            self._waiting.move_to_end(tenant)
            if not places:
                del self._waiting[tenant]
            if not place.done():
                place.set_result(None)
                self._num_let_in += 1
        if self._is_turning:
            loop.call_soon(self._turn, loop)
