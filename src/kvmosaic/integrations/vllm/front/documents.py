"""/v1/documents and /v1/files next to vLLM's own routes: stored texts that prompts name by id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from kvmosaic.api.errors import RETRY_SECONDS, ApiError
from kvmosaic.documents import DocumentStore, StoreLimits, document_place
from kvmosaic.integrations.vllm.front.internal_requests import ask
from kvmosaic.integrations.vllm.front.served import FrontDocuments
from kvmosaic.integrations.vllm.front.settings import TENANT, FrontSettings
from kvmosaic.web import documents, files
from kvmosaic.web.errors import NO_TELEMETRY, add_error_replies
from kvmosaic.web.request_body import BodyRules, RequestBodyMiddleware

if TYPE_CHECKING:
    from kvmosaic.integrations.vllm.front.middleware import ComposedDocuments

_OUTER = "kvmosaic.outer"
"""Key in an ASGI scope of the scope in vLLM's own app."""


def open_documents(settings: FrontSettings, clock: Callable[[], float] | None = None) -> DocumentStore:
    """Opens the stored documents, which are those of our own server if the place is the same.

    Raises:
        InvalidConfig: a place that cannot be used.
    """
    return DocumentStore(
        document_place(settings.documents_dir, settings.documents_url),
        default_ttl_seconds=settings.document_ttl,
        version_seconds=settings.document_version_seconds,
        limits=StoreLimits(settings.max_documents, settings.max_documents_bytes),
        clock=clock,
    )


class DocumentRoutes:
    """The routes of our own server, over the documents of the front.

    Requires the same API key as vLLM's /v1/models: vLLM itself checks it, before anything of a body is read.
    """

    def __init__(self, front: ComposedDocuments) -> None:
        self._front = front
        self._app: FastAPI | None = None
        self._lock = asyncio.Lock()
        self._owned: dict[str, bool] = {}

    def answers(self, path: str, scope: Scope) -> bool:
        """Whether a path is one of these routes, and vLLM has none of its own there."""
        if path.startswith(documents.ROUTE):
            return path.removeprefix(documents.ROUTE)[:1] in ("", "/", ":")
        found = [route for route in (files.ROUTE, "/v1/vector_stores") if f"{path}/".startswith(f"{route}/")]
        return any(not self._find_owned(route, scope) for route in found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; a client that is gone gets no reply."""
        models = await ask(self._front.app, scope, "GET", "/v1/models")
        if models.status_code >= 400:
            return await models(scope, receive, send)
        async with self._lock:  # on first use, since not every vLLM has documents; it takes a tenth of a second
            if self._app is None:
                self._app = await self._front.in_thread(document_app, self._front)
        return await self._app({**scope, "state": {}, _OUTER: scope}, receive, send)

    def _find_owned(self, route: str, scope: Scope) -> bool:
        """Returns whether vLLM has a route of its own, looked up once."""
        if route not in self._owned:
            routes: Iterable[Any] = getattr(scope.get("app"), "routes", ())
            self._owned[route] = any(str(getattr(each, "path", "")).startswith(route) for each in routes)
        return self._owned[route]


def document_app(front: ComposedDocuments) -> FastAPI:
    """Builds the app of these routes; the scope of a request has that of vLLM's own app in it."""
    settings = front.settings
    app = FastAPI(openapi_url=None, redirect_slashes=False, telemetry=NO_TELEMETRY)
    app.state.serve_documents = lambda request: FrontDocuments(front, request.scope[_OUTER])
    add_error_replies(app)
    for path in (documents.ROUTE, documents.ONE):
        for verb in ("sleep", "wake"):
            app.add_api_route(f"{path}:{verb}", _refuse_sleep, methods=["POST"])
    app.include_router(documents.router())
    app.include_router(files.router())
    rules = BodyRules(
        max_bytes=settings.max_body_bytes,
        setting="KVMOSAIC_MAX_BODY_BYTES",
        max_upload_bytes=max(settings.max_documents_bytes, settings.max_body_bytes),
        upload_setting="KVMOSAIC_MAX_DOCUMENTS_BYTES",
        full=_full,
        in_thread=lambda tenant, work, *args: front.in_thread(work, *args),
        tenant_of=lambda scope: TENANT,
        has_tenants=False,
    )
    app.add_middleware(RequestBodyMiddleware, rules=rules)
    return app


async def _refuse_sleep() -> None:
    raise ApiError(404, "inside vLLM documents do not sleep or wake by themselves; use vLLM's /sleep for all of it")


def _full(reason: str, code: str) -> ApiError:
    told = f"{reason}; try again in {RETRY_SECONDS} s"
    headers = {"Retry-After": str(RETRY_SECONDS)}
    return ApiError(429, told, type="rate_limit_error", code=code, headers=headers)
