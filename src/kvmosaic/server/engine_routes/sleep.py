"""Sleep routes: release the engine's device memory for a while, and take it back."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from kvmosaic.engine import AsyncEngine, Engine
from kvmosaic.errors import EngineAsleep, EngineError
from kvmosaic.server.admission import Admission
from kvmosaic.server.documents.routes import ROUTE
from kvmosaic.server.errors import ApiError
from kvmosaic.server.openai.replies import ErrorReply, error_replies
from kvmosaic.server.tenants import current_admin

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


def router(engine: AsyncEngine, admission: Admission, *, has_tiers: bool) -> APIRouter:
    """Returns `/sleep`, `/wake_up` and `/is_sleeping`, named as in vLLM, and the sleep of cold chunks."""
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


def _unavailable(engine: AsyncEngine, admission: Admission, error: EngineError) -> ApiError:
    code = "engine_asleep" if engine.is_asleep else "unavailable"
    headers = {"Retry-After": str(admission.retry_seconds)}
    return ApiError(503, str(error), type="service_unavailable", code=code, headers=headers)
