"""JSON bodies: limits that apply before parsing, and long bodies parsed and validated beside the event loop."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json

from kvmosaic.api.unknown_fields import without_unknown_fields
from kvmosaic.server.errors import ApiError

PARSED = "kvmosaic.body"
"""Key in an ASGI scope of a long body, as `LongBody`."""
WARNINGS = "kvmosaic.warnings"
"""Key in an ASGI scope of the warnings about a body, which its reply carries in a header, too."""
TOLERANT = "x-ignores-unknown-fields"
"""Mark of a tolerant route in the OpenAPI document."""
Warnings = tuple[str, ...]
MAX_DEPTH = 64
MAX_VALUES = 2**18
"""Maximum number of values in one body: enough for a long list of token ids, too few to take seconds to parse."""
MAX_DIGITS = 64

# Outside of strings, N and I can only begin NaN and Infinity. Token ids come in hundreds of thousands: a run of short
# integers is one part.
_PARTS = re.compile(rb'(?:[0-9]{1,18}+[,\s]++)++|["\][{}NI]|-?[0-9][0-9.eE+-]*+')
# A string is skipped whole, also an unterminated one: to search its end from each of its quotes takes quadratic time.
_REST_OF_TEXT = re.compile(rb'(?:[^"\\]++|\\.)*+"?+', re.DOTALL)
_MAX_ESCAPED_QUOTES = 16
"""Number of escaped quotes checked one by one, which is a hundred times as fast for a long string without any."""
_MAX_BACKSLASHES = 64
"""Number of backslashes before one quote counted in the same way."""
# A pair of surrogates is one character; a lone surrogate, and NUL, cannot be sent back or tokenized.
_ESCAPES = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u(?:[dD][89a-fA-F][0-9a-fA-F]{2}|0000))|\\."
)


def check_json(body: bytes) -> None:
    """Refuses well-formed but harmful bodies: deep nesting, NaN, endless numbers, lone surrogates, NUL.

    Takes one pass; the parser checks whether the body is JSON at all.

    Raises:
        ApiError: 400, what was found, and the limit.
    """
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        raise _refused("the body is not UTF-8") from None
    if b"\0" in body:
        raise _refused("the body holds a NUL character; remove it")
    has_escapes = b"\\u" in body
    depth = num_values = position = 0
    while part := _PARTS.search(body, position):
        position = part.end()
        first = body[part.start()]
        is_run = body[position - 1] in b", \t\r\n"
        num_values += body.count(b",", part.start(), position) if is_run else 1
        if num_values > MAX_VALUES:
            raise _refused(f"the body holds more than {MAX_VALUES} values; send less at once")
        if first == ord('"'):
            position = _end_of_text(body, position)
            if has_escapes:
                _check_text(body, part.end(), position)
        elif first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _refused(f"the body is nested deeper than {MAX_DEPTH} levels; send flatter JSON")
        elif first in b"]}":
            depth -= 1
        elif not is_run:
            _check_number(part.group())


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


def _end_of_text(body: bytes, begin: int) -> int:
    """Returns the position after the closing quote of the string that begins at `begin`, or after the body."""
    position = begin
    for _ in range(_MAX_ESCAPED_QUOTES):
        quote = body.find(b'"', position)
        if quote < 0:
            return len(body)
        before = body[max(position, quote - _MAX_BACKSLASHES) : quote]
        num_backslashes = len(before) - len(before.rstrip(b"\\"))
        if num_backslashes == _MAX_BACKSLASHES:
            break
        if num_backslashes % 2 == 0:
            return quote + 1
        position = quote + 1
    rest = _REST_OF_TEXT.match(body, position)
    return rest.end() if rest else len(body)


def _check_text(body: bytes, begin: int, end: int) -> None:
    if body.find(b"\\u", begin, end) >= 0 and any(each.group(1) for each in _ESCAPES.finditer(body, begin, end)):
        raise _refused("a text holds half a character (a lone surrogate) or a NUL character; remove it")


def _check_number(number: bytes) -> None:
    if number[0] in b"NI":
        raise _refused("NaN and Infinity are not JSON; send a number")
    if len(number) > MAX_DIGITS:
        raise _refused(f"a number has more than {MAX_DIGITS} characters; send a shorter one")
    if b"e" in number.lower():
        try:
            is_finite = abs(float(number)) < float("inf")
        except ValueError:
            return  # the parser has a better message
        if not is_finite:
            raise _refused("a number is too large; send a smaller one")


def _refused(message: str) -> ApiError:
    return ApiError(400, message, code="invalid_json")
