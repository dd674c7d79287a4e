"""The app: every route behind the same door."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from fastapi import FastAPI

from kvmosaic import __version__
from kvmosaic.server.errors import add_error_replies
from kvmosaic.server.services import Services

# Each of them has `router(services) -> fastapi.APIRouter`.
PARTS = ("health", "exposition", "openai", "documents", "dashboard")


def build_app(services: Services) -> FastAPI:
    """Every route over one set of services."""
    app = FastAPI(title="kvmosaic", version=__version__, redoc_url=None, docs_url=None)
    app.state.services = services
    add_error_replies(app)
    for part in PARTS:
        name = f"kvmosaic.server.{part}"
        if find_spec(name) and hasattr(module := import_module(name), "router"):
            app.include_router(module.router(services))
    return app
