"""Dashboard viewer: the pending events of one open stream."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.server.dashboard.views import record_view
from kvmosaic.server.metrics.request_log import RequestRecord
from kvmosaic.server.tenants import Tenant

NUM_RECORDS = 60
"""Maximum number of records drawn, and waiting to be sent."""
PAUSE_SECONDS = 0.2
"""Pause between two deliveries, so that a busy server sends its records in batches."""

News = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NumberedRecord:
    """A request record with the numbers that identify it in the dashboard."""

    record: RequestRecord
    number: int
    """Number among the records of all tenants; for admins only."""
    own_number: int
    """Number among the records of its tenant: the other number would reveal how many requests other tenants send."""

    def view_for(self, tenant: Tenant, *, with_segments: bool = True) -> News:
        """Returns the view that a tenant allowed to see the record receives."""
        number = self.number if tenant.is_admin else self.own_number
        return record_view(number, self.record, with_segments=with_segments)


@dataclass(eq=False, slots=True)
class Viewer:
    """Pending events of one viewer: the latest state of each kind, and ended records.

    A slow viewer misses old states and the oldest records; the queue is bounded.
    """

    tenant: Tenant
    _latest: dict[str, News] = field(default_factory=dict)
    _sent: dict[str, News] = field(default_factory=dict)
    _records: deque[NumberedRecord] = field(default_factory=lambda: deque(maxlen=NUM_RECORDS))
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)
    _is_closed: bool = False

    def may_see(self, record: RequestRecord) -> bool:
        """Whether this viewer may see a record."""
        return self.tenant.is_admin or self.tenant.name == record.tenant

    def offer(self, name: str, news: News) -> None:
        """Queues a state unless it equals the last one with this name."""
        if news != self._sent.get(name):
            self._sent[name] = self._latest[name] = news
            self._has_news.set()

    def add_record(self, numbered: NumberedRecord) -> None:
        """Queues a record if this viewer may see it."""
        if self.may_see(numbered.record):
            self._records.append(numbered)
            self._has_news.set()

    def close(self) -> None:
        """Ends the stream of this viewer."""
        self._is_closed = True
        self._has_news.set()

    async def take(self) -> list[tuple[str, Any]]:
        """Waits for events and returns all of them; an empty list means that the stream has ended."""
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
