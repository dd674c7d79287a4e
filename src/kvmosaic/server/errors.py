"""HTTP errors: every failure in OpenAI's shape, and one table from error types to statuses."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvmosaic import errors
from kvmosaic.prompt.ways_out import for_clients
from kvmosaic.server.validation_message import validation_message

logger = logging.getLogger("kvmosaic.server")

INVALID_REQUEST = "invalid_request_error"
QUOTA = "insufficient_quota"
MAX_MESSAGE_CHARACTERS = 2_000
"""Maximum length of a message: messages quote the request, but must not send all of it back."""
MAX_PARAM_CHARACTERS = 200
RETRY_SECONDS = 1


class ApiError(Exception):
    """An error shown to the client: `{"error": {"message", "type", "param", "code"}}` with a status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _printable(message)
        self.type = type
        self.code = code
        self.param = None if param is None else _printable(param[:MAX_PARAM_CHARACTERS])
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The body of the reply, or of an error event in the middle of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def reply(self) -> JSONResponse:
        """Returns the whole reply."""
        return JSONResponse(self.body, self.status, headers=self.headers)


# The first matching row decides, so subclasses come before their base classes.
_ROWS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (errors.TooMuchWork, 422, INVALID_REQUEST, "too_much_work"),
    (errors.PromptTooLong, 400, INVALID_REQUEST, "context_length_exceeded"),
    (errors.InvalidPrompt, 400, INVALID_REQUEST, None),
    (errors.InvalidSampling, 400, INVALID_REQUEST, None),
    (errors.InvalidRepair, 400, INVALID_REQUEST, "invalid_repair"),
    (errors.InvalidConfig, 400, INVALID_REQUEST, None),
    (errors.UnknownDocument, 404, INVALID_REQUEST, "document_not_found"),
    (errors.DocumentExists, 409, INVALID_REQUEST, "document_exists"),
    (errors.DocumentChanged, 412, INVALID_REQUEST, "document_changed"),
    (errors.DocumentTooLarge, 413, INVALID_REQUEST, "document_too_large"),
    (errors.DocumentStoreFull, 429, QUOTA, "document_store_full"),
    (errors.UnknownChunk, 404, INVALID_REQUEST, "chunk_not_found"),
    (errors.UnknownRequest, 404, INVALID_REQUEST, "request_not_found"),
    (errors.ChunkInUse, 409, INVALID_REQUEST, "chunk_in_use"),
    (errors.ChunkCacheOff, 409, INVALID_REQUEST, "chunk_cache_off"),
    (errors.QuotaExceeded, 429, QUOTA, "quota_exceeded"),
    (errors.ChunkCacheFull, 400, INVALID_REQUEST, "chunk_cache_full"),
    (errors.NotMovable, 400, INVALID_REQUEST, "not_movable"),
    (errors.QueueFull, 429, "rate_limit_error", "queue_full"),
    (errors.RequestTooLarge, 400, INVALID_REQUEST, "request_too_large"),
    (errors.EngineFailing, 503, "service_unavailable", "engine_failing"),
    (errors.EngineAsleep, 503, "service_unavailable", "engine_asleep"),
    (errors.EngineStopped, 503, "service_unavailable", "engine_stopped"),
)


def as_api_error(error: BaseException, request_id: str = "") -> ApiError:
    """Returns the error that a client sees.

    Our own errors keep their message, which is about the request. Of any other error, and of a failed step, the client
    sees only the request id; the traceback goes to the log.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid_body(error)
    if isinstance(error, HTTPException):
        return _http_error(error)
    for known, status, kind, code in _ROWS:
        if isinstance(error, known):
            headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else {}
            if kind == QUOTA:  # nothing changes on its own: clients with automatic retries should not retry
                headers = {"X-Should-Retry": "false"}
            return ApiError(status, for_clients(str(error)), type=kind, code=code, headers=headers)
    logger.error("request %s failed", request_id or "?", exc_info=error)
    about = f" (request {request_id})" if request_id else ""
    return ApiError(500, f"internal error{about}", type="server_error", code="internal_error")


def add_error_replies(app: FastAPI) -> None:
    """Makes every failing route of `app` answer in OpenAI's shape."""

    async def reply(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error, request_id_of(request)).reply()

    for kind in (ApiError, errors.KVMosaicError, RequestValidationError, HTTPException, RecursionError, UnicodeError):
        app.add_exception_handler(kind, reply)


def request_id_of(request: Request) -> str:
    """Returns the id of this request; also in the X-Request-Id header of its reply."""
    return str(getattr(request.state, "request_id", ""))


def _invalid_body(error: RequestValidationError) -> ApiError:
    faults = error.errors()
    if faults and faults[0]["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON", code="invalid_json")
    fault = validation_message(faults, error.body)
    return ApiError(400, fault.told, param=fault.where or None)


def _http_error(error: HTTPException) -> ApiError:
    allowed = (error.headers or {}).get("Allow", "another method")
    known = {
        404: "no such address; those of the OpenAI API begin with /v1, and /openapi.json lists all there are",
        405: f"this address takes {allowed} only",
    }
    message = known.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, message, code=code, headers=error.headers)


def _printable(message: str) -> str:
    """Returns the message, truncated, and without characters that UTF-8 cannot encode."""
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[: MAX_MESSAGE_CHARACTERS - 1] + "…"
    return message.encode("utf-8", "replace").decode("utf-8")
