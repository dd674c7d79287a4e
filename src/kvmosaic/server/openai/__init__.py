"""Routes of OpenAI's API: answers, models and tokens."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path

from kvmosaic.api.fields import Reply
from kvmosaic.server.admission import RequestThreads
from kvmosaic.server.execution import PromptRunner
from kvmosaic.server.generation.prompts import PromptSources, served_model
from kvmosaic.server.openai import chat, completions, responses, tokens
from kvmosaic.server.tenants import current_tenant
from kvmosaic.web.errors import error_replies

__all__ = ["router"]


def router(sources: PromptSources, runner: PromptRunner, threads: RequestThreads) -> APIRouter:
    """Returns all routes."""
    routes = APIRouter()
    for part in (chat, completions, responses):
        routes.include_router(part.router(sources, runner, threads))
    routes.include_router(models_router(sources, created=int(time.time())))
    routes.include_router(tokens.router(sources, threads))
    return routes


class Model(Reply):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: None = None
    max_model_len: int | None


class ModelList(Reply):
    """All names under which the model is served."""

    object: Literal["list"] = "list"
    data: list[Model]


def models_router(sources: PromptSources, *, created: int) -> APIRouter:
    """Returns the routes; `created` is the time of the start, in unix seconds."""
    routes = APIRouter(tags=["models"], dependencies=[Depends(current_tenant)])

    def model(name: str) -> Model:
        return Model(
            id=name,
            created=created,
            owned_by="kvmosaic",
            root=sources.settings.model_names[0],
            max_model_len=sources.max_positions,
        )

    @routes.get("/v1/models", response_model=ModelList, responses=error_replies(401, 500))
    async def list_models() -> ModelList:
        """Lists the names of the served model."""
        return ModelList(data=[model(name) for name in sources.settings.model_names])

    @routes.get("/v1/models/{model_name:path}", response_model=Model, responses=error_replies(401, 404, 500))
    async def get_model(model_name: Annotated[str, Path(max_length=4_096)]) -> Model:
        """One of the names."""
        return model(served_model(sources, model_name))

    return routes
