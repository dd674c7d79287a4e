"""HTTP errors: every failure of a route in OpenAI's shape, or in Anthropic's on its routes."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from kvmosaic import errors
from kvmosaic.api.error_forms import error_reply
from kvmosaic.api.errors import ApiError, invalid_body, known_error

__all__ = ["ApiError", "add_error_replies", "as_api_error", "refusal_of", "reply_of_error", "request_id_of"]

logger = logging.getLogger("kvmosaic.server")


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


def _http_error(error: HTTPException) -> ApiError:
    allowed = (error.headers or {}).get("Allow", "another method")
    known = {
        404: "no such address; those of the OpenAI API begin with /v1, and /openapi.json lists all there are",
        405: f"this address takes {allowed} only",
    }
    message = known.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers)
