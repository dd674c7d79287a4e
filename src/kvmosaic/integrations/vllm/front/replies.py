"""Replies of the front's own routes, and the methods that these take."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from kvmosaic.api.errors import ApiError
from kvmosaic.api.fields import Reply


def json_reply(
    reply: Reply, status: int = 200, headers: dict[str, str] | None = None, *, has_defaults: bool = False
) -> Response:
    """The reply of a route, in JSON; `has_defaults`: with the fields that are not set, too."""
    return JSONResponse(reply.model_dump(exclude_unset=not has_defaults), status, headers=headers)


def check_method(method: str, *allowed: str) -> None:
    """Raises ApiError 405 for another method."""
    if method not in allowed:
        told = f"this address takes {', '.join(allowed)} only"
        raise ApiError(405, told, code="method_not_allowed", headers={"Allow": ", ".join(allowed)})
