"""The app: every route behind the same door."""

from __future__ import annotations

import logging
from importlib import import_module

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from kvmosaic import __version__
from kvmosaic.server.access import Access
from kvmosaic.server.envelope import Envelope
from kvmosaic.server.errors import add_error_replies
from kvmosaic.server.exposition import CountReplies
from kvmosaic.server.intake import Intake
from kvmosaic.server.services import Services

logger = logging.getLogger("kvmosaic.server")

# Each of them has `router(services) -> fastapi.APIRouter`.
PARTS = ("health", "exposition", "openai", "documents", "dashboard")


def build_app(services: Services) -> FastAPI:
    """Every route over one set of services.

    envelope ──▶ count ──▶ CORS ──▶ access ──▶ intake ──▶ routes
    id, headers                      key        body, client gone
    """
    settings = services.settings
    app = FastAPI(
        title="kvmosaic",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.services = services
    add_error_replies(app)
    for part in PARTS:
        try:
            module = import_module(f"kvmosaic.server.{part}")
            app.include_router(module.router(services))
        except (ImportError, AttributeError) as error:
            logger.warning("the routes of %s are not there yet: %s", part, error)
    app.add_middleware(Intake, services=services)  # the last one added is the first one asked
    app.add_middleware(Access, services=services)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(CountReplies, metrics=services.metrics)
    app.add_middleware(Envelope)
    return app
