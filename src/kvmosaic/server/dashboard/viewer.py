"""A viewer: someone who looks at the dashboard, and what is still to be sent there."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.server.dashboard.views import record_view
from kvmosaic.server.record import RequestRecord
from kvmosaic.server.tenants import Tenant

NUM_RECORDS = 60
"""Records that are drawn, and the most that wait to be sent."""
PAUSE_SECONDS = 0.2
"""Between two deliveries, so that a busy server sends its records in handfuls."""

News = dict[str, Any]


@dataclass(eq=False, slots=True)
class Viewer:
    """What is to be sent: the latest of each kind of state, and the records that have ended.

    A slow viewer misses old states and the oldest records; nothing piles up.
    """

    tenant: Tenant
    _latest: dict[str, News] = field(default_factory=dict)
    _sent: dict[str, News] = field(default_factory=dict)
    _records: deque[tuple[int, RequestRecord]] = field(default_factory=lambda: deque(maxlen=NUM_RECORDS))
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closed: bool = False

    def may_see(self, record: RequestRecord) -> bool:
        """Whether this viewer may be told of a request."""
        return self.tenant.is_admin or self.tenant.name == record.tenant

    def offer(self, name: str, news: News) -> None:
        """Sends a state, unless the last one under this name was the same."""
        if news != self._sent.get(name):
            self._sent[name] = self._latest[name] = news
            self._has_news.set()

    def add_record(self, number: int, record: RequestRecord) -> None:
        """Sends a record, if this viewer may see it."""
        if self.may_see(record):
            self._records.append((number, record))
            self._has_news.set()

    def close(self) -> None:
        """Ends the stream of this viewer."""
        self._is_closed = True
        self._has_news.set()

    async def take(self) -> list[tuple[str, Any]]:
        """Waits for news and takes them all; an empty list: the stream has ended."""
        await self._has_news.wait()
        if self._is_closed:
            return []
        await asyncio.sleep(PAUSE_SECONDS)
        self._has_news.clear()
        news: list[tuple[str, Any]] = list(self._latest.items())
        if self._records:
            news.insert(0, ("records", [record_view(number, record) for number, record in self._records]))
        self._latest.clear()
        self._records.clear()
        return news
