"""The FastAPI app: all routes and the middleware around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from starlette.responses import JSONResponse
from starlette.types import Scope

from kvmosaic import __version__
from kvmosaic.api.errors import MESSAGES_ROUTE
from kvmosaic.server import anthropic, dashboard, engine_routes, openai
from kvmosaic.server.dashboard.feed import Feed
from kvmosaic.server.documents.served import ServerDocuments
from kvmosaic.server.generation.prompts import PromptSources
from kvmosaic.server.metrics import prometheus
from kvmosaic.server.middleware import (
    OPEN_PATHS,
    AccessLogMiddleware,
    AuthenticationMiddleware,
    ResponseHeadersMiddleware,
    TracingMiddleware,
)
from kvmosaic.server.services import Services
from kvmosaic.web import documents, files
from kvmosaic.web.errors import NO_TELEMETRY, add_error_replies
from kvmosaic.web.json_body import open_tolerant_bodies
from kvmosaic.web.request_body import BodyRules, RequestBodyMiddleware

DESCRIPTION = (
    "OpenAI's and Anthropic's routes over a language model that computes each document once and composes prompts from "
    "what it has. Errors have OpenAI's shape, those of /v1/messages Anthropic's; every reply carries an X-Request-Id."
)
KEY = "key"
ASKING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", MESSAGES_ROUTE)
"""Routes that run the engine."""
ANTHROPIC_HEADERS = ("X-Api-Key", "Anthropic-Version", "Anthropic-Beta", "Anthropic-Dangerous-Direct-Browser-Access")
"""Headers that Anthropic's clients send from browsers; but for the key, they change nothing here."""


def build_app(services: Services) -> FastAPI:
    """Builds the app: all routes over one set of services.

    (trace ──▶) response headers ──▶ access log ──▶ count ──▶ CORS ──▶ authentication ──▶ request body ──▶ routes
                id, headers                                            key, host          body, disconnects
    """
    settings = services.settings
    app = FastAPI(
        title="kvmosaic",
        version=__version__,
        description=DESCRIPTION,
        openapi_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        telemetry=NO_TELEMETRY,
    )
    app.state.services = services
    app.state.serve_documents = partial(ServerDocuments.of, services)
    add_error_replies(app)
    for routes in _routers(services):
        app.include_router(routes)
    app.openapi = lambda: _document(app, services.tenants.needs_key)  # type: ignore[method-assign]

    @app.get("/openapi.json", include_in_schema=False)
    def document() -> JSONResponse:  # in a thread: it takes a second the first time
        return JSONResponse(app.openapi())

    app.add_middleware(  # the middleware that is added last runs first
        RequestBodyMiddleware, rules=_body_rules(services)
    )
    app.add_middleware(AuthenticationMiddleware, tenants=services.tenants, settings=settings)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                "If-Match",
                "X-Request-Id",
                *ANTHROPIC_HEADERS,
            ],
            expose_headers=["ETag", "Retry-After", "X-Request-Id", "Request-Id", "X-Kvmosaic-Warning"],
        )
    app.add_middleware(prometheus.CountReplies, metrics=services.metrics)
    app.add_middleware(AccessLogMiddleware)
    app.add_middleware(ResponseHeadersMiddleware)
    if services.tracing is not None:
        app.add_middleware(TracingMiddleware, tracing=services.tracing)
    return app


def _body_rules(services: Services) -> BodyRules:
    settings, admission = services.settings, services.admission

    def asking(scope: Scope) -> AbstractContextManager[None]:
        asks = scope["method"] == "POST" and scope["path"].endswith(ASKING)
        return admission.asking(Request(scope).state.tenant) if asks else nullcontext()

    return BodyRules(
        max_bytes=settings.max_body_bytes,
        setting="--max-body-bytes",
        max_upload_bytes=max(settings.max_documents_bytes, settings.max_body_bytes),
        upload_setting="--max-documents-bytes",
        full=admission.full,
        in_thread=services.threads.run,
        tenant_of=lambda scope: str(Request(scope).state.tenant.name),
        asking=asking,
    )


def _routers(services: Services) -> Iterator[APIRouter]:
    """Yields all routes, each with the services it uses."""
    llm, engine, admission, threads = services.llm, services.engine, services.admission, services.threads
    yield engine_routes.health_router(engine, admission)
    yield prometheus.router(services.metrics)
    sources = PromptSources(llm, services.documents, services.settings)
    yield openai.router(sources, services.runner, threads)
    yield anthropic.router(sources, services.runner, threads)
    yield documents.router()
    yield files.router()
    yield engine_routes.sleep_router(engine, admission, has_tiers=llm.engine.offloader is not None)
    feed = Feed(llm, engine, services.documents, admission, services.records, services.settings)
    yield dashboard.router(feed)
    yield dashboard.docs_router()


def _document(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """Returns the OpenAPI document, with the routes that need a key."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes, servers=app.servers
        )
        scheme = {"type": "http", "scheme": "bearer", "description": "A key that the server was started with."}
        open_tolerant_bodies(document)
        document.setdefault("components", {})["securitySchemes"] = {KEY: scheme}
        for path, operations in document["paths"].items():
            is_open = path in OPEN_PATHS or not needs_key
            for operation in operations.values():
                operation["security"] = [] if is_open else [{KEY: []}]
        app.openapi_schema = document
    return app.openapi_schema
