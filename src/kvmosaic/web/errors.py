"""HTTP errors: every failure of a route in OpenAI's shape, or in Anthropic's on its routes."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from kvmosaic import errors
from kvmosaic.api.errors import ApiError, ErrorDetail, error_reply, invalid_body, known_error
from kvmosaic.api.fields import Reply

__all__ = ["ApiError", "add_error_replies", "as_api_error", "refusal_of", "reply_of_error", "request_id_of"]

logger = logging.getLogger("kvmosaic.server")


NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""For apps of FastAPI: its own spans and logs have messages of errors in them, which quote requests."""


def as_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """Returns the error that a client sees.

    Our own errors keep their message, which is about the request. Of any other error, and of a failed step, the client
    sees only the request id; the traceback goes to the log.
    """
    if isinstance(error, RequestValidationError):
        return invalid_body(error.errors(), error.body)
    if isinstance(error, HTTPException):
        return _http_error(error)
    if (known := known_error(error)) is not None:
        return known
    logger.error("request %s failed", request_id or "?", exc_info=error)
    about = f" (request {request_id})" if request_id else ""
    return ApiError(500, f"internal error{about}", type="server_error", code="internal_error")


def add_error_replies(app: FastAPI) -> None:
    """Makes every failing route of `app` answer in the shape of its API."""

    async def reply(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException) and error.status_code == 405:  # Starlette names the first route's method
            error = not_allowed(*_methods_of(request))
        return reply_of_error(as_api_error(error, request_id_of(request)), request.scope)

    for kind in (ApiError, errors.KVMosaicError, RequestValidationError, HTTPException, RecursionError, UnicodeError):
        app.add_exception_handler(kind, reply)


def reply_of_error(error: ApiError, scope: Scope) -> JSONResponse:
    """Returns the reply of a request that was refused or failed, in the shape of the API that its path belongs to."""
    scope.setdefault("state", {})["refusal"] = error
    path: str = scope["path"]
    return error_reply(error, path.removeprefix(scope.get("root_path", "")), request_id_of(Request(scope)))


def refusal_of(scope: Scope) -> ApiError | None:
    """Returns the error that a request was answered with; None if it was not refused."""
    refusal: ApiError | None = scope.get("state", {}).get("refusal")
    return refusal


def request_id_of(request: Request) -> str:
    """Returns the id of this request; also in the X-Request-Id header of its reply."""
    return str(getattr(request.state, "request_id", ""))


class ErrorReply(Reply):
    """An error, in OpenAI's shape."""

    error: ErrorDetail


def error_replies(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The declared errors of a route."""
    meanings = {
        400: "Something in the request cannot be used.",
        401: "No API key, or an unknown one.",
        404: "An unknown model, or a document that is not stored.",
        413: "The body is too large.",
        429: "Too many requests wait, or a quota is used up; see Retry-After.",
        500: "Something failed inside.",
        503: "The server is shutting down, or its engine has stopped.",
    }
    known: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorReply, "description": meanings[status]} for status in statuses or meanings
    }
    return {**known, "default": {"model": ErrorReply, "description": "Any other error, in the same shape."}}


def streamed(description: str) -> dict[str, Any]:
    """The declared other form of a 200: server-sent events, each with a text of JSON (or [DONE]) as its data."""
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": {"type": "string"}}}
    content = {"text/event-stream": {"itemSchema": event}}
    return {"description": description, "content": content}


def _methods_of(request: Request) -> list[str]:
    """Returns the methods that an address takes, of all routes of the app."""
    scopes = {method: {**request.scope, "method": method} for method in ("GET", "POST", "PUT", "PATCH", "DELETE")}
    return [
        method
        for method, scope in scopes.items()
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    ]


def not_allowed(*methods: str) -> ApiError:
    """Returns the error of an address that takes other methods: these."""
    allowed = ", ".join(methods)
    return ApiError(405, f"this address takes {allowed} only", code="method_not_allowed", headers={"Allow": allowed})


def _http_error(error: HTTPException) -> ApiError:
    if error.status_code == 404:
        told = "no such address; those of the OpenAI API begin with /v1, and /openapi.json lists all there are"
        return ApiError(404, told, code="not_found", headers=error.headers)
    return ApiError(error.status_code, str(error.detail), headers=error.headers)
