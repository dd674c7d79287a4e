"""A viewer: someone who looks at the dashboard, and what is still to be sent there."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.server.dashboard.views import record_view
from kvmosaic.server.request_log import RequestRecord
from kvmosaic.server.tenants import Tenant

NUM_RECORDS = 60
"""Records that are drawn, and the most that wait to be sent."""
PAUSE_SECONDS = 0.2
"""Between two deliveries, so that a busy server sends its records in handfuls."""

News = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NumberedRecord:
    """A record with the numbers by which the dashboard tells records apart."""

    record: RequestRecord
    number: int
    """Among the records of all tenants; for admins."""
    own_number: int
    """Among the records of its tenant: from the other number it would learn how much others ask."""

    def view_for(self, tenant: Tenant, *, with_segments: bool = True) -> News:
        """What a tenant that may see it is sent."""
        number = self.number if tenant.is_admin else self.own_number
        return record_view(number, self.record, with_segments=with_segments)


@dataclass(eq=False, slots=True)
class Viewer:
    """What is to be sent: the latest of each kind of state, and the records that have ended.

    A slow viewer misses old states and the oldest records; nothing piles up.
    """

    tenant: Tenant
    _latest: dict[str, News] = field(default_factory=dict)
    _sent: dict[str, News] = field(default_factory=dict)
    _records: deque[NumberedRecord] = field(default_factory=lambda: deque(maxlen=NUM_RECORDS))
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

    def add_record(self, numbered: NumberedRecord) -> None:
        """Sends a record, if this viewer may see it."""
        if self.may_see(numbered.record):
            self._records.append(numbered)
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
            news.insert(0, ("records", [numbered.view_for(self.tenant) for numbered in self._records]))
        self._latest.clear()
        self._records.clear()
        return news
