"""JSON bodies: long ones are parsed and validated beside the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json

from kvmosaic.api.json_limits import check_json
from kvmosaic.api.unknown_fields import without_unknown_fields

PARSED = "kvmosaic.body"
"""Key in an ASGI scope of a long body, as `LongBody`."""
WARNINGS = "kvmosaic.warnings"
"""Key in an ASGI scope of the warnings about a body, which its reply carries in a header, too."""
TOLERANT = "x-ignores-unknown-fields"
"""Mark of a tolerant route in the OpenAPI document."""
Warnings = tuple[str, ...]


def parse_long(body: bytes) -> list[Any] | None:
    """Checks a body and parses it; None if it is not JSON, which its route reports.

    Raises:
        ApiError: see `check_json`.
    """
    check_json(body)
    try:
        return [from_json(body, allow_inf_nan=False)]  # ten times as fast as json.loads for one long text
    except ValueError:
        return None


@dataclass(slots=True)
class LongBody:
    """A parsed body that is too long to be validated on the event loop."""

    value: Any
    in_thread: Callable[[Callable[[], Any]], Awaitable[Any]]
    """Runs a function beside the event loop, in the tenant's turn."""


class ParsedRoute(APIRoute):
    """A route that takes a long body as it was parsed, and validates it beside the event loop.

    Either would block the event loop for a tenth of a second per 16 MB, and the probes of an operator with it.
    Unknown fields are refused; see `TolerantRoute`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, which asks the request for its JSON."""
        handle = super().get_route_handler()

        async def handle_parsed(request: Request) -> Response:
            if long := request.scope.pop(PARSED, None):
                _give(request, *await long.in_thread(lambda: self._read(long)))
            try:
                return await handle(request)
            except RequestValidationError as error:
                # of a short body, before anything was done; a long one has been validated above
                _give(request, *self._accepted(error))
            return await handle(request)

        return handle_parsed

    def _read(self, body: LongBody) -> tuple[Any, Warnings]:
        value, body.value = body.value, None  # the parsed body is freed as soon as its model is there
        try:
            return self._validated(value), ()
        except RequestValidationError as error:
            return self._accepted(error)

    def _accepted(self, error: RequestValidationError) -> tuple[Any, Warnings]:
        """Returns the model of a body with faults that do no harm, and a warning for each; here there are none."""
        raise error

    def _validated(self, value: Any) -> Any:
        """Returns the body as its model, which passes FastAPI's own validation at once.

        Raises:
            RequestValidationError: as FastAPI would.
        """
        if self.body_field is None:
            return value
        assert len(self.dependant.body_params) == 1  # FastAPI would look for its parts by name
        model, errors = self.body_field.validate(value, loc=("body",))
        if errors:
            raise RequestValidationError(errors, body=value)
        return model


class TolerantRoute(ParsedRoute):
    """A route that leaves unknown fields out and warns of them, since clients send fields of other servers."""

    def __init__(self, *args: Any, openapi_extra: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(*args, openapi_extra={TOLERANT: True, **(openapi_extra or {})}, **options)

    def _accepted(self, error: RequestValidationError) -> tuple[Any, Warnings]:
        body, warnings = without_unknown_fields(error.errors(), error.body)
        if not warnings:
            raise error
        try:
            return self._validated(body), warnings
        except RequestValidationError as remaining:
            is_mistyped = any(fault["type"] == "missing" for fault in remaining.errors())
            raise error if is_mistyped else remaining from None


def route_class(*, strict: bool) -> type[ParsedRoute]:
    """Returns the class of routes that answer prompts."""
    return ParsedRoute if strict else TolerantRoute


def warnings_of(request: Request) -> Warnings:
    """Returns the warnings about the body of a request."""
    warnings: Warnings = request.scope.get(WARNINGS, ())
    return warnings


def _give(request: Request, model: Any, warnings: Warnings) -> None:
    """Hands a validated body to FastAPI's handler."""
    request._json = model
    request._body = b"{}"  # only its presence and type are checked
    request.scope[WARNINGS] = warnings
