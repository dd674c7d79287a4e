"""Health probes: whether the process lives, and whether it accepts requests."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from kvmosaic.engine import AsyncEngine
from kvmosaic.server.admission import Admission

HOPELESS_SECONDS = 60.0
"""An engine that fails for longer may have lost its device until the process is restarted."""


class Health(BaseModel):
    """What an orchestrator asks for; the status of the reply says the same."""

    status: Literal["ok", "asleep", "loading", "draining", "failed"]


def router(engine: AsyncEngine, admission: Admission) -> APIRouter:
    """/livez, /readyz and /health."""
    routes = APIRouter(tags=["health"])

    def status_now() -> Literal["ok", "asleep", "draining", "failed"]:
        if not engine.is_healthy:
            return "failed"
        if admission.is_draining:
            return "draining"
        return "asleep" if engine.is_asleep or engine.refuses else "ok"

    def reply(response: Response, *, is_well: bool) -> Health:
        if not is_well:
            response.status_code = 503
            response.headers["Retry-After"] = str(admission.retry_seconds)
        return Health(status=status_now())

    @routes.get("/livez", responses={503: {"model": Health}})
    async def livez(response: Response) -> Health:
        """Whether the process should go on: 503 once its engine has stopped, or has failed for a minute."""
        if engine.is_alive and engine.failing_seconds < HOPELESS_SECONDS:
            return Health(status="ok")
        response.status_code = 503
        return Health(status="failed")

    @routes.get("/readyz", responses={503: {"model": Health}})
    async def readyz(response: Response) -> Health:
        """Whether requests are taken: 503 while the model loads, the server shuts down or refuses them asleep."""
        status = status_now()
        return reply(response, is_well=status == "ok" or (status == "asleep" and not engine.refuses))

    @routes.get("/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """The same as /readyz, by the name that other servers have for it, but a server that sleeps is well."""
        return reply(response, is_well=status_now() in ("ok", "asleep"))

    return routes
