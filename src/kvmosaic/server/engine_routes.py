"""Routes of the engine: health probes and sleep."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from kvmosaic import __version__
from kvmosaic.api.fields import Only
from kvmosaic.engine import AsyncEngine, Engine
from kvmosaic.errors import EngineAsleep, EngineError
from kvmosaic.server.admission import AdmissionControl
from kvmosaic.server.tenants import current_admin
from kvmosaic.web.documents import ROUTE
from kvmosaic.web.errors import ApiError, ErrorReply, error_replies

HOPELESS_SECONDS = 60.0
"""An engine that fails for longer may have lost its device until the process is restarted."""


class Health(BaseModel):
    """What an orchestrator asks for; the status of the reply says the same."""

    status: Literal["ok", "asleep", "loading", "draining", "failed"]


class Version(BaseModel):
    """The version of this server."""

    version: str


def health_router(engine: AsyncEngine, admission: AdmissionControl) -> APIRouter:
    """/livez, /readyz and /health, and /version."""
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

    @routes.api_route("/healthz", methods=["GET", "HEAD"], include_in_schema=False)
    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", responses={503: {"model": Health}})
    async def health(response: Response) -> Health:
        """The same as /readyz, by the names that other servers have (also /healthz), but one that sleeps is well."""
        return reply(response, is_well=status_now() in ("ok", "asleep"))

    @routes.get("/version")
    async def version() -> Version:
        """The version of kvmosaic."""
        return Version(version=__version__)

    return routes


MAX_ACCESSES = 2**40
MAX_IDLE_SECONDS = 1e12
NO_TIERS: dict[int | str, dict[str, Any]] = {409: {"model": ErrorReply, "description": "There are no tiers."}}


class Sleep(BaseModel):
    """Whether the caches have no memory on the device."""

    is_sleeping: bool


class SleepWish(BaseModel):
    """How deeply, and what becomes of prompts; the query of `/sleep`."""

    model_config = ConfigDict(extra="forbid")

    level: int = Field(default=1, ge=1, le=2, description="1 keeps the caches in host memory, 2 drops them.")
    mode: Literal["wait", "refuse"] = Field(default="wait", description="What happens to prompts that come meanwhile.")


class ResetWish(BaseModel):
    """What is dropped; the query of `/reset_prefix_cache`, as in vLLM."""

    model_config = ConfigDict(extra="forbid")

    reset_running_requests: Annotated[bool, Only((False, "false", "0"), "abort the requests first")] = False
    reset_external: bool = Field(
        default=False, description="Also the entries in tiers that this process has stored or loaded."
    )


class CacheReset(BaseModel):
    """What became of the cache."""

    is_empty: bool
    """Whether nothing is left; else running requests use the rest."""


class ColdChunks(BaseModel):
    """Which chunks are cold."""

    model_config = ConfigDict(extra="forbid")

    min_accesses: int = Field(
        default=1, ge=0, le=MAX_ACCESSES, description="Chunks that were used less often may leave."
    )
    idle_seconds: float = Field(
        default=600.0, ge=0, le=MAX_IDLE_SECONDS, description="If they were unused for so long."
    )


class SleepingChunks(BaseModel):
    """What became of cold chunks."""

    object: Literal["documents.asleep"] = "documents.asleep"
    num_chunks: int
    """Chunks that left the device; their next use brings them back."""


def sleep_router(engine: AsyncEngine, admission: AdmissionControl, *, has_tiers: bool) -> APIRouter:
    """`/sleep`, `/wake_up`, `/is_sleeping` and `/reset_prefix_cache`, as in vLLM, and the sleep of cold chunks."""
    unavailable = partial(_unavailable, engine, admission)
    routes = APIRouter(tags=["sleep"], responses=error_replies(), dependencies=[Depends(current_admin)])

    @routes.post("/sleep")
    async def sleep(wish: Annotated[SleepWish, Query()]) -> Sleep:
        """Gives the device memory of the caches back; replies when the requests that run have ended.

        `is_sleeping` is false in the reply if another call woke the engine before it slept.
        """
        try:
            return Sleep(is_sleeping=await engine.sleep(wish.level, refuse=wish.mode == "refuse"))
        except EngineError as error:
            raise unavailable(error) from error

    @routes.post("/wake_up", dependencies=[Depends(_no_query)])
    async def wake_up() -> Sleep:
        """Takes the memory again and goes on with all that waits. A server that is awake stays so."""
        try:
            await engine.wake()
        except EngineError as error:
            raise unavailable(error) from error
        return Sleep(is_sleeping=False)

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache(wish: Annotated[ResetWish, Query()]) -> CacheReset:
        """Drops all that is cached and not in use, of all tenants; documents stay stored and are computed again."""
        reset = partial(Engine.reset_prefix_cache, reset_external=wish.reset_external)
        try:
            return CacheReset(is_empty=await engine.call(reset))
        except EngineError as error:
            raise unavailable(error) from error

    @routes.get("/is_sleeping")
    async def is_sleeping() -> Sleep:
        """Whether the caches have no memory on the device now."""
        return Sleep(is_sleeping=engine.is_asleep)

    @routes.post(ROUTE + ":sleep", responses=NO_TIERS)
    async def sleep_cold_chunks(body: ColdChunks | None = None) -> SleepingChunks:
        """Moves chunks of all tenants from the device to the tiers that are idle and were seldom used."""
        if not has_tiers:
            raise ApiError(409, "chunks sleep in tiers, and there are none; see --chunk-tier", code="no_tiers")
        cold = body or ColdChunks()
        move = partial(_move, min_accesses=cold.min_accesses, idle_seconds=cold.idle_seconds)
        return SleepingChunks(num_chunks=await engine.call(move))

    return routes


async def _no_query(request: Request) -> None:
    """Refuses every query parameter, since it would be ignored silently."""
    if names := list(request.query_params):
        raise ApiError(400, f"unknown field {names[0]!r}; remove it, or look at how it is spelled", param=names[0])


def _move(engine: Engine, min_accesses: int, idle_seconds: float) -> int:
    if engine.is_asleep:
        raise EngineAsleep("the engine sleeps, and its chunks cannot be moved now; wake it first")
    return engine.kv_cache.evict_cold(min_accesses, idle_seconds)


def _unavailable(engine: AsyncEngine, admission: AdmissionControl, error: EngineError) -> ApiError:
    code = "engine_asleep" if engine.is_asleep else "unavailable"
    headers = {"Retry-After": str(admission.retry_seconds)}
    return ApiError(503, str(error), type="service_unavailable", code=code, headers=headers)
