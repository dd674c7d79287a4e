"""Documents as HTTP resources: stored texts that prompts name, and where their KV cache is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import APIRouter

    from kvmosaic.server.services import Services

__all__ = ["router"]


def router(services: Services) -> APIRouter:
    """Returns all routes of /v1/documents over one set of services."""
    from fastapi import APIRouter

    from kvmosaic.server.documents import routes, warm_routes

    both = APIRouter()
    both.include_router(warm_routes.router(services))
    both.include_router(routes.router(services))
    return both
