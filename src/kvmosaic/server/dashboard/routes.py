"""Routes of the dashboard: the HTML file, its event stream and the examples."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse

from kvmosaic.server.dashboard.feed import Feed
from kvmosaic.server.dashboard.page import Markup, example_documents, example_questions
from kvmosaic.server.generation.sse import EventStream, open_stream
from kvmosaic.server.tenants import Tenant, current_tenant


def router(feed: Feed) -> APIRouter:
    """Returns the routes `/` and `/dashboard/*`; only the dashboard uses them, so the OpenAPI document omits them."""
    routes = APIRouter(include_in_schema=False)
    markup = Markup.read()

    @routes.get("/")
    async def dashboard() -> HTMLResponse:
        """The HTML file. It holds no data, so it needs no key."""
        return HTMLResponse(
            markup.text, headers={"Content-Security-Policy": markup.policy, "Cache-Control": "no-cache"}
        )

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
