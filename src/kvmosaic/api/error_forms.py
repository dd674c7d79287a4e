"""Forms of errors: OpenAI's on every route but those of Anthropic's API, which have its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from kvmosaic.api.errors import ApiError
from kvmosaic.api.fields import Reply

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

MESSAGES_ROUTE = "/v1/messages"

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesErrorDetail(Reply):
    """What went wrong, in Anthropic's form."""

    type: str
    message: str


class MessagesError(Reply):
    """An error, in Anthropic's form."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None


def is_messages_route(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path == MESSAGES_ROUTE or path.startswith(f"{MESSAGES_ROUTE}/")


def messages_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Returns an error in Anthropic's form; its type follows from the status.

    That a prompt is too long is said in Anthropic's words first, by which clients know it.
    """
    number, most = error.excess
    message = f"prompt is too long: {number} tokens > {most} maximum; {error.message}" if number else error.message
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id or None}


def error_reply(error: ApiError, path: str, request_id: str) -> JSONResponse:
    """Returns the whole reply of a failed request, in the form of the API that its path belongs to."""
    from starlette.responses import JSONResponse

    if not is_messages_route(path):
        return error.reply()
    return JSONResponse(messages_error(error, request_id), error.status, headers=error.headers)
