"""Documents as HTTP resources: stored texts that prompts name, and where their KV cache is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.server.documents.names import shown_name, with_shown_names
from kvmosaic.server.documents.store import DocumentStore, StoreLimits, StoreUsage
from kvmosaic.server.documents.stored import DocumentDraft, Match, StoredDocument, StoredText
from kvmosaic.server.documents.tenant_documents import DocumentPage

if TYPE_CHECKING:
    from fastapi import APIRouter

    from kvmosaic.server.services import Services

__all__ = [
    "DocumentDraft",
    "DocumentPage",
    "DocumentStore",
    "Match",
    "StoreLimits",
    "StoreUsage",
    "StoredDocument",
    "StoredText",
    "router",
    "shown_name",
    "with_shown_names",
]


def router(services: Services) -> APIRouter:
    """Returns all routes of /v1/documents over one set of services."""
    from fastapi import APIRouter

    from kvmosaic.server.documents import routes, warm_routes

    both = APIRouter()
    both.include_router(warm_routes.router(services))
    both.include_router(routes.router(services))
    return both
