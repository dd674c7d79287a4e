"""Routes of OpenAI's API: answers, models and tokens."""

from __future__ import annotations

from fastapi import APIRouter

from kvmosaic.server.admission import RequestThreads
from kvmosaic.server.execution import PromptRunner
from kvmosaic.server.generation.prompts import PromptSources
from kvmosaic.server.openai import chat, completions, models, responses, tokens

__all__ = ["router"]


def router(sources: PromptSources, runner: PromptRunner, threads: RequestThreads) -> APIRouter:
    """Returns all routes."""
    routes = APIRouter()
    for part in (chat, completions, responses):
        routes.include_router(part.router(sources, runner, threads))
    routes.include_router(models.router(sources, created=int(runner.clock())))
    routes.include_router(tokens.router(sources, threads))
    return routes
