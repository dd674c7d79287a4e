"""JSON bodies: long ones are parsed and validated beside the event loop.

Without --strict, unknown fields are left out with a warning, unless they look like a field that matters; the OpenAPI
document says so.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.datastructures import MutableHeaders
from starlette.types import Message

from kvmosaic.api.errors import ApiError, path_of
from kvmosaic.api.fields import NEEDLESS
from kvmosaic.api.json_limits import check_json

PARSED = "kvmosaic.body"
"""Key in an ASGI scope of a long body, as `LongBody`."""
WARNINGS = "kvmosaic.warnings"
"""Key in an ASGI scope of the warnings about a body, which its reply carries in a header, too."""
TOLERANT = "x-ignores-unknown-fields"
"""Mark of a tolerant route in the OpenAPI document."""
MAX_WARNING_CHARACTERS = 2_000
Warnings = tuple[str, ...]


def parse_long(body: bytes) -> tuple[list[Any], Warnings]:
    """Checks a body and parses it, in a list, with warnings; an empty list if it is not JSON, which its route reports.

    Raises:
        ApiError: see `check_json`.
    """
    body, warnings = check_json(body)
    try:
        return [from_json(body, allow_inf_nan=False)], warnings  # ten times as fast as json.loads for one long text
    except ValueError:
        return [], ()


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


def warn(request: Request, *warnings: str) -> None:
    """Adds warnings about the body of a request, each once."""
    request.scope[WARNINGS] = tuple(dict.fromkeys((*warnings_of(request), *warnings)))


def add_warnings(start: Message, warnings: Warnings) -> None:
    """Adds a header with these warnings to the message that begins a reply."""
    if warnings:
        MutableHeaders(scope=start)["X-Kvmosaic-Warning"] = ascii("; ".join(warnings))[1:-1][:MAX_WARNING_CHARACTERS]


def _give(request: Request, model: Any, warnings: Warnings) -> None:
    """Hands a validated body to FastAPI's handler."""
    request._json = model
    request._body = b"{}"  # only its presence and type are checked
    warn(request, *warnings)


MAX_UNKNOWN = 64
"""Maximum number of different unknown fields of one body; the same field in each of many messages counts once."""
MAX_NAME_CHARACTERS = 64
_LIKENESS = 0.8
_MATTERING = tuple(
    "documents cache_salt find_documents preamble companions position_strategy chunk_context documents_order repair "
    "adapter messages prompt input system instructions text title sees position_offset cache_control "
    "prompt_cache_breakpoint tools tool_choice response_format structured_outputs max_tokens max_completion_tokens "
    "max_output_tokens temperature top_p top_k seed stop stop_sequences window_tokens priority n".split()
)
"""Fields whose loss changes who shares a cache, what the model reads, or what it answers."""
_MEANT = {"salt": "cache_salt", "docs": "documents"}
_MEANT_IN_DOCUMENTS = dict.fromkeys(("content", "contents", "page_content", "data"), "text")
"""Other words for such fields, in our Python API and in other libraries."""


def without_unknown_fields(faults: Sequence[Mapping[str, Any]], body: Any) -> tuple[Any, tuple[str, ...]]:
    """Returns a copy of a body without unknown and needless fields, and a warning for each; without warnings, itself.

    Args:
        faults: all that pydantic found wrong with the body.
        body: the parsed body; stays as it is.

    Raises:
        ApiError: 400: a name is nearly that of a field that matters, or there are too many unknown fields.
    """
    found = [(path, fault) for fault in faults if (path := _unknown(fault, body))]
    shown = {_shown(path): path for path, fault in found if fault["type"] != NEEDLESS}
    needless = [(_shown(path), fault["ctx"]["reason"]) for path, fault in found if fault["type"] == NEEDLESS]
    if len(shown) > MAX_UNKNOWN:
        raise ApiError(400, f"the body has more than {MAX_UNKNOWN} different unknown fields; remove them")
    for path in shown.values():
        _check_likeness(path)
    if not found:
        return body, ()
    pruned = copy.deepcopy(body)
    for path, _ in reversed(found):  # places in a list stay until it is their turn
        _remove(pruned, path)
    warnings = [f"unknown field {name!r} was ignored" for name in shown]
    return pruned, (*warnings, *(f"{name!r} was ignored: {reason}" for name, reason in dict.fromkeys(needless)))


def _unknown(fault: Mapping[str, Any], body: Any) -> list[str | int]:
    """The path of an unknown or needless field of the body; empty for any other fault."""
    if fault["type"] not in ("extra_forbidden", NEEDLESS) or fault["loc"][0] != "body":
        return []
    path = path_of(fault, body)
    return path if path and path[-1] == fault["loc"][-1] else []


def _shown(path: Sequence[str | int]) -> str:
    """A path with * for each place in a list, cut to what fits a header."""
    return ".".join("*" if isinstance(part, int) else part[:MAX_NAME_CHARACTERS] for part in path)


def _check_likeness(path: Sequence[str | int]) -> None:
    name = str(path[-1])
    if len(name) > MAX_NAME_CHARACTERS:
        return
    is_in_document = len(path) == 3 and path[0] == "documents"
    meant = _MEANT.get(name) or (_MEANT_IN_DOCUMENTS.get(name) if is_in_document else None)
    if meant is None:
        plain = {_plain(known): known for known in _MATTERING}
        found = get_close_matches(_plain(name), plain, n=1, cutoff=_LIKENESS)
        meant = plain[found[0]] if found else None
    if meant is not None:
        where = ".".join(map(str, path))
        told = f"did you mean {meant!r}?" if meant != name else "it does not go with the others, or not in this place"
        raise ApiError(400, f"unknown field {where!r}; {told}", param=where)


def _plain(name: str) -> str:
    """A name without case, underscores and dashes."""
    return "".join(character for character in name.lower() if character.isalnum())


def _remove(body: Any, path: Sequence[str | int]) -> None:
    *way, last = path
    for part in way:
        body = body[part]
    if isinstance(last, int):
        del body[last]
    else:
        body.pop(last, None)


_REFERENCE = re.compile(r'"#/components/schemas/([^"]+)"')
_SUFFIX = "WithUnknown"


def open_tolerant_bodies(document: dict[str, Any]) -> None:
    """Allows unknown fields in the bodies of routes that leave them out; other routes go on refusing them.

    A schema that both kinds of routes take gets an open copy, with a name of its own.
    """
    schemas: dict[str, Any] = document["components"]["schemas"]
    operations = [each for of_path in document["paths"].values() for each in of_path.values() if "requestBody" in each]
    tolerant = [each for each in operations if TOLERANT in each]
    refusing = [each for each in operations if TOLERANT not in each]
    taken = _reached(schemas, tolerant)
    shared = taken & _reached(schemas, refusing)
    for name in shared:
        schemas[name + _SUFFIX] = schemas[name]
    for name in sorted(taken):
        target = name + _SUFFIX if name in shared else name
        schemas[target] = _without_closure(_renamed(schemas[name], shared))
    for operation in tolerant:
        operation["requestBody"] = _renamed(operation["requestBody"], shared)


def _reached(schemas: dict[str, Any], operations: Iterable[dict[str, Any]]) -> set[str]:
    """Names of the schemas that the bodies of these operations use, also through others."""
    reached: set[str] = set()
    left = [name for operation in operations for name in _REFERENCE.findall(json.dumps(operation["requestBody"]))]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += _REFERENCE.findall(json.dumps(schemas[name]))
    return reached


def _renamed(part: Any, shared: set[str]) -> Any:
    """A part of the document with references to the open copies of shared schemas."""
    text = _REFERENCE.sub(lambda found: found[0][:-1] + (_SUFFIX if found[1] in shared else "") + '"', json.dumps(part))
    return json.loads(text)


def _without_closure(schema: Any) -> Any:
    """A schema that allows unknown fields, at any depth."""
    if isinstance(schema, list):
        return [_without_closure(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("examples", "default", "enum") else _without_closure(value)
        for key, value in schema.items()
        if not (key == "additionalProperties" and value is False)
    }
