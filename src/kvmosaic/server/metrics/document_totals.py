"""How much tenants store, read from the database beside the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection

from kvmosaic.documents import DocumentStore, StoreUsage
from kvmosaic.errors import DocumentStoreUnavailable

WAIT_SECONDS = 1.0
"""Wait for a database that does not answer; then the numbers are those of its last answer."""


class DocumentTotals:
    """The numbers of stored documents, for the page and the metrics.

    A database that is locked or does not answer delays neither the event loop nor a scrape by more than `WAIT_SECONDS`.
    One read is in progress at a time. Used on the event loop.
    """

    def __init__(self, store: DocumentStore) -> None:
        self._store = store
        self._known: dict[str | None, StoreUsage] = {}
        self._reading: asyncio.Task[None] | None = None

    def known(self, tenant: str | None) -> StoreUsage:
        """The numbers of a tenant, or (None) of all, when they were last read; zeros: never."""
        return self._known.get(tenant, StoreUsage(0, 0, 0))

    async def read(self, tenants: Collection[str | None]) -> None:
        """Reads the numbers of these tenants, if the database answers in time."""
        end, covers_all = time.monotonic() + WAIT_SECONDS, False
        while not covers_all:
            if covers_all := self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(asyncio.to_thread(self._read, tuple(tenants)), name="totals")
            assert self._reading is not None
            done, _ = await asyncio.wait({self._reading}, timeout=max(end - time.monotonic(), 0.0))
            if not done:
                return

    def _read(self, tenants: Collection[str | None]) -> None:
        try:
            self._known.update({tenant: self._store.usage(tenant) for tenant in tenants})
        except DocumentStoreUnavailable:
            return
