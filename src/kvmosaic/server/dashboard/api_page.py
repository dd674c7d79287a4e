"""Routes of `/docs`: the OpenAPI document in Swagger UI, all of it from this server."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, Response

from kvmosaic.server.dashboard.page import hash_of

POLICY = (
    "default-src 'none'; script-src 'self' {script}; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Only this server's address; Swagger UI writes styles into its elements."""
ASSETS = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>kvmosaic: API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>
"use strict";
async function show() {
  let key = "", reply;
  for (;;) {
    reply = await fetch("openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
    if (reply.status !== 401) break;
    key = prompt("API key of this server");
    if (!key) return;
  }
  const spec = await reply.json();
  spec.servers = [{ url: new URL(".", location).pathname.replace(/\\/$/, "") || "/" }];
  const page = SwaggerUIBundle({ spec, dom_id: "#swagger-ui", deepLinking: true, validatorUrl: null });
  if (key) page.preauthorizeApiKey("key", key);
}
show();
</script>
</body>
</html>
"""


def router() -> APIRouter:
    """Returns the routes; they hold no data, so they need no key, and the page asks for one if the server needs it."""
    routes = APIRouter(include_in_schema=False)
    policy = POLICY.format(script=hash_of("script", _PAGE))

    @routes.get("/docs")
    async def docs() -> HTMLResponse:
        """The page."""
        return HTMLResponse(_PAGE, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})

    for name, kind in ASSETS.items():
        _add_asset(routes, name, kind)
    return routes


def _add_asset(routes: APIRouter, name: str, kind: str) -> None:
    content = files("fastapi_swagger").joinpath("resources", name).read_bytes()

    @routes.get(f"/docs/{name}")
    async def asset() -> Response:
        """A file of Swagger UI."""
        return Response(content, media_type=kind, headers={"Cache-Control": "public, max-age=86400"})
