"""Periodic sweep: deletes expired documents and drops their chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from kvmosaic.documents import DocumentStore
from kvmosaic.errors import DocumentStoreUnavailable
from kvmosaic.server.documents.cached import drop_superseded
from kvmosaic.server.services import Services

SWEEP_SECONDS = 5.0
logger = logging.getLogger("kvmosaic.server")


@asynccontextmanager
async def swept(services: Services, seconds: float = SWEEP_SECONDS) -> AsyncIterator[None]:
    """Sweeps every few seconds, as long as the app lives."""
    task = asyncio.create_task(_sweep_always(services, seconds), name="document-sweep")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def sweep(services: Services) -> None:
    """Deletes expired documents, and drops the chunks of all superseded texts."""
    await asyncio.to_thread(_tidy, services.documents)
    await drop_superseded(services, lingering=True)


def _tidy(documents: DocumentStore) -> None:
    documents.expire()
    documents.save()


async def _sweep_always(services: Services, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await sweep(services)
        except DocumentStoreUnavailable as error:
            logger.warning("expired documents are not deleted now: %s", error)
        except Exception:  # the next sweep continues with the rest
            logger.exception("the sweep of stored documents failed")
