"""Routes of OpenAI's API: answers, models and tokens."""

from __future__ import annotations

from fastapi import APIRouter

from kvmosaic.server.openai import chat, completions, models, responses, tokens
from kvmosaic.server.services import Services

__all__ = ["router"]


def router(services: Services) -> APIRouter:
    """Returns all routes over one set of services."""
    routes = APIRouter()
    for part in (chat, completions, responses, models, tokens):
        routes.include_router(part.router(services))
    return routes
