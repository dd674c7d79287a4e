"""The sweep: from time to time, documents whose time is over leave, and with them their chunks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

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
    """Drops expired documents, and the chunks of all texts that nobody can ask for any more."""
    services.documents.expire()
    await drop_superseded(services, lingering=True)


async def _sweep_always(services: Services, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await sweep(services)
        except Exception:  # the next sweep goes on with what is left
            logger.exception("the sweep of stored documents failed")
