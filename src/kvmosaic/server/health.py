"""Health: whether the process lives, and whether it takes requests."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from kvmosaic.server.services import Services

HOPELESS_SECONDS = 60.0
"""An engine that fails for longer may have lost its device until the process is started anew."""


class Health(BaseModel):
    """What an orchestrator asks for; the status of the reply says the same."""

    status: Literal["ok", "loading", "draining", "failed"]


def router(services: Services) -> APIRouter:
    """/livez, /readyz and /health."""
    routes = APIRouter(tags=["health"])

    def is_ready(response: Response) -> Health:
        status: Literal["ok", "draining", "failed"] = "ok"
        if not services.engine.is_well:
            status = "failed"
        elif services.admission.is_draining:
            status = "draining"
        if status != "ok":
            response.status_code = 503
            response.headers["Retry-After"] = str(services.admission.retry_seconds)
        return Health(status=status)

    @routes.get("/livez", responses={503: {"model": Health}})
    async def livez(response: Response) -> Health:
        """Whether the process should go on: 503 once its engine has stopped, or has failed for a minute."""
        if services.engine.is_alive and services.engine.failing_seconds < HOPELESS_SECONDS:
            return Health(status="ok")
        response.status_code = 503
        return Health(status="failed")

    @routes.get("/readyz", responses={503: {"model": Health}})
    async def readyz(response: Response) -> Health:
        """Whether requests are taken: 503 while the model loads and while the server shuts down."""
        return is_ready(response)

    @routes.get("/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """The same as /readyz, by the name that other servers have for it."""
        return is_ready(response)

    return routes
