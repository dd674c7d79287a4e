"""Throttle: admits at most N requests per event-loop tick, so that a probe never waits behind a burst."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

AT_ONCE = 2
"""Requests that begin in one turn of the event loop; each takes it a few milliseconds."""


class Throttle:
    """Lets `AT_ONCE` requests in at each turn of the event loop: of each tenant in the order in which they came.

    Tenants take turns, so that a crowd of one makes nobody else wait. What a hundred requests do before they first wait
    would otherwise run as one piece: the loop looks for new requests only when all that is ready has run. Used on the
    event loop only.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        """By tenant; whose turn is next comes first."""
        self._num_let_in = 0
        self._is_turning = False

    async def enter(self, tenant: str) -> None:
        """Returns when it is the turn of this request of a tenant; leaving while it waits is safe."""
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
        """Once in every turn of the loop, as long as somebody comes."""
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
