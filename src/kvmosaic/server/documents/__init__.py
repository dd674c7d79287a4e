"""Documents as HTTP resources: stored texts that prompts name, and where their KV cache is."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import APIRouter

    from kvmosaic.server.services import Services

__all__ = ["router"]


def router(services: Services) -> APIRouter:
    """Returns all routes of /v1/documents and /v1/files over one set of services."""
    from fastapi import APIRouter

    from kvmosaic.server.documents import files, routes

    all_routes = APIRouter()
    # those with a verb before the ids
    for part in (routes.batch_router, files.router, routes.warm_router, routes.router):
        all_routes.include_router(part(services))
    return all_routes
