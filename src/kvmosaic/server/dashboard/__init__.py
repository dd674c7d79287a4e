"""Routes of the dashboard: the HTML file, its event stream and the examples.

And of `/docs`: the OpenAPI document in Swagger UI, all of it from this server.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.resources import files
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse, Response

from kvmosaic.server.dashboard.feed import Feed
from kvmosaic.server.dashboard.views import Markup, example_documents, example_questions, hash_of
from kvmosaic.server.tenants import Tenant, current_tenant
from kvmosaic.web.sse import EventStream, open_stream


def router(feed: Feed) -> APIRouter:
    """Returns the routes `/` and `/dashboard/*`; only the dashboard uses them, so the OpenAPI document omits them."""
    routes = APIRouter(include_in_schema=False)
    markup = Markup.read()

    @routes.api_route("/", methods=["GET", "HEAD"])
    async def dashboard() -> HTMLResponse:
        """The HTML file. It holds no data, so it needs no key."""
        return HTMLResponse(
            markup.text, headers={"Content-Security-Policy": markup.policy, "Cache-Control": "no-cache"}
        )

    @routes.get("/favicon.ico", status_code=204)
    async def icon() -> None:
        """Browsers ask for it, though the pages have icons of their own."""

    @routes.get("/dashboard/events")
    async def dashboard_events(request: Request, tenant: Annotated[Tenant, Depends(current_tenant)]) -> EventStream:
        """The live state of the server, as far as this tenant may see it."""
        return await open_stream(request, _events(feed, tenant))

    @routes.get("/dashboard/examples")
    async def dashboard_examples() -> dict[str, Any]:
        """The bundled documents and questions about them, to begin with."""
        return {"documents": example_documents(), "questions": example_questions()}

    return routes


async def _events(feed: Feed, tenant: Tenant) -> AsyncGenerator[str, None]:
    async with aclosing(feed.watch(tenant)) as news:
        async for name, data in news:
            yield f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


DOCS_POLICY = (
    "default-src 'none'; script-src 'self' {script}; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Only this server's address; Swagger UI writes styles into its elements."""
ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}


def docs_router() -> APIRouter:
    """Returns the routes; they hold no data, so they need no key, and the page asks for one if the server needs it."""
    routes = APIRouter(include_in_schema=False)
    page = files(__package__).joinpath("docs.html").read_text(encoding="utf-8")
    policy = DOCS_POLICY.format(script=hash_of("script", page))

    @routes.get("/docs")
    async def docs() -> HTMLResponse:
        """The page."""
        return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})

    for name, kind in ASSETS.items():
        _add_asset(routes, name, kind)
    return routes


def _add_asset(routes: APIRouter, name: str, kind: str) -> None:
    content = files("fastapi_swagger").joinpath("resources", name).read_bytes()

    @routes.get(f"/docs/{name}")
    async def asset() -> Response:
        """A file of Swagger UI."""
        return Response(content, media_type=kind, headers={"Cache-Control": "public, max-age=86400"})
