"""API errors: every failure in OpenAI's shape or Anthropic's, and one table from error types to statuses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from kvmosaic import errors
from kvmosaic.api.fields import Reply
from kvmosaic.prompt.document import ID_PATTERN, ID_RULE
from kvmosaic.tools.request import NAME_PATTERN, NAME_RULE

if TYPE_CHECKING:
    from starlette.responses import JSONResponse


_SHAPES = {ID_PATTERN: f"must be {ID_RULE}", NAME_PATTERN: f"must be {NAME_RULE}"}
"""Patterns in words; the pattern itself says little to most users."""
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Value|Object|JSON|Data) should\b")


def validation_message(found: Sequence[Mapping[str, Any]], body: Any = None) -> tuple[str, str]:
    """Returns a field, such as "messages.0.content" ("": all), and a sentence on what pydantic found wrong with `body`.

    That is the first error; in a field of a union type, the error that lies deepest, of the member that was probably
    meant, by type. A mistyped name comes before the name that is missing for it.
    """
    faults = [(".".join(map(str, path_of(each, body))), each) for each in found]
    faults = faults or [("", {"msg": "invalid", "type": ""})]
    first = faults[0][0]
    inside = [fault for fault in faults if first and f"{fault[0]}.".startswith(f"{first}.")] or faults[:1]
    where, fault = max(inside, key=lambda each: (each[0].count("."), not each[1]["type"].endswith("_type")))
    if fault["type"] == "missing":
        beside = where.rpartition(".")[0]
        unknown = (
            name for name, each in faults if each["type"] == "extra_forbidden" and name.rpartition(".")[0] == beside
        )
        if name := next(unknown, None):
            return _mistyped(name, where)
        return where, f"{where} is missing" if where else "the body is missing; send a JSON object, at least {}"
    if fault["type"] == "extra_forbidden":
        return where, f"unknown field {where!r}; remove it, or look at how it is spelled"
    return where, f"{where or 'the body'}: {_said(fault)}"


def _mistyped(unknown: str, missing: str) -> tuple[str, str]:
    if get_close_matches(unknown, [missing], n=1):
        return unknown, f"unknown field {unknown!r}; did you mean {missing!r}?"
    return unknown, f"unknown field {unknown!r}, while {missing!r} is missing; look at how it is spelled"


def path_of(fault: Mapping[str, Any], body: Any) -> list[str | int]:
    """Returns the keys and indexes that lead to the field of a fault, without pydantic's names of union members."""
    place, *parts = fault["loc"] or ("",)
    if place != "body":
        return parts
    path, value = [], body
    for part in parts:
        is_sent = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
        if is_sent:
            value = value[part]
        if is_sent or (fault["type"] == "missing" and part == parts[-1]):
            path.append(part)
    return path


def _said(fault: Mapping[str, Any]) -> str:
    context = fault.get("ctx") or {}
    if fault["type"] == "union_tag_invalid":
        return f"{context['discriminator']} is {context['tag']!r}; it must be one of {context['expected_tags']}"
    if fault["type"] == "union_tag_not_found":
        return f"{context['discriminator']} is missing"
    if fault["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return "must be a JSON object"
    if fault["type"] == "string_pattern_mismatch" and context["pattern"] in _SHAPES:
        return _SHAPES[context["pattern"]]
    said = str(fault["msg"]).removeprefix("Value error, ").replace(" after validation", "")
    return _SUBJECT.sub("must", said)


B = TypeVar("B", bound=BaseModel)

INVALID_REQUEST = "invalid_request_error"
QUOTA = "insufficient_quota"
MAX_MESSAGE_CHARACTERS = 2_000
"""Maximum length of a message: messages quote the request, but must not send all of it back."""
MAX_PARAM_CHARACTERS = 200
RETRY_SECONDS = 1


class ErrorDetail(Reply):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


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
        self.excess = (0, 0)
        """Of a prompt that is too long: its tokens (0: unknown or another error), and their maximum."""

    @property
    def body(self) -> dict[str, Any]:
        """The body of the reply, or of an error event in the middle of a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def reply(self) -> JSONResponse:
        """Returns the whole reply."""
        from starlette.responses import JSONResponse

        return JSONResponse(self.body, self.status, headers=self.headers)


# The first matching row decides, so subclasses come before their base classes.
_ROWS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (errors.TooMuchWork, 422, INVALID_REQUEST, "too_much_work"),
    (errors.PromptTooLong, 400, INVALID_REQUEST, "context_length_exceeded"),
    (errors.InvalidPrompt, 400, INVALID_REQUEST, None),
    (errors.InvalidSampling, 400, INVALID_REQUEST, None),
    (errors.InvalidRepair, 400, INVALID_REQUEST, "invalid_repair"),
    (errors.InvalidPreamble, 400, INVALID_REQUEST, "invalid_preamble"),
    (errors.MissingExtra, 501, INVALID_REQUEST, "missing_extra"),
    (errors.InvalidConfig, 400, INVALID_REQUEST, None),
    (errors.UnknownDocument, 404, INVALID_REQUEST, "document_not_found"),
    (errors.DocumentExists, 409, INVALID_REQUEST, "document_exists"),
    (errors.DocumentChanged, 412, INVALID_REQUEST, "document_changed"),
    (errors.DocumentTooLarge, 413, INVALID_REQUEST, "document_too_large"),
    (errors.DocumentStoreFull, 429, QUOTA, "document_store_full"),
    (errors.DocumentDamaged, 500, "server_error", "document_damaged"),
    (errors.DocumentStoreUnavailable, 503, "service_unavailable", "document_store_unavailable"),
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


def known_error(error: BaseException, places: Sequence[int] = ()) -> ApiError | None:
    """Returns the error that a client sees for one of ours, whose message is about the request; None for another one.

    Args:
        error: any error.
        places: of the prompt's first documents in `documents` of the body: an error about one of them names it.
    """
    if isinstance(error, ApiError):
        return error
    for known, status, kind, code in _ROWS:
        if isinstance(error, known):
            headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else {}
            if kind == QUOTA:  # nothing changes on its own: clients with automatic retries should not retry
                headers = {"X-Should-Retry": "false"}
            place = error.document if isinstance(error, errors.InvalidPrompt) else None
            message, param = for_clients(str(error)), None
            if places and places[-1] >= len(places) and isinstance(error, errors.InvalidPrompt):
                message += " (blank and repeated documents do not count in numbers)"
            if place is not None and place < len(places):
                param = f"documents.{places[place]}"
            told = ApiError(status, message, type=kind, code=code, param=param, headers=headers)
            if isinstance(error, errors.PromptTooLong):
                told.excess = error.num_tokens, error.max_tokens
            return told
    return None


def invalid_body(faults: Sequence[Mapping[str, Any]], body: Any = None) -> ApiError:
    """Returns the error for all that pydantic found wrong with a body."""
    if faults and faults[0]["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON", code="invalid_json")
    where, told = validation_message(faults, body)
    return ApiError(400, told, param=where or None)


def read_body(kind: type[B], body: Any, place: str = "body") -> B:
    """Returns a body, or the parameters of a query, as its type.

    Raises:
        ApiError: 400, what is wrong with it.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise invalid_body([{**fault, "loc": (place, *fault["loc"])} for fault in error.errors()], body) from None


def _printable(message: str) -> str:
    """Returns the message, truncated, and without characters that UTF-8 cannot encode."""
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[: MAX_MESSAGE_CHARACTERS - 1] + "…"
    return message.encode("utf-8", "replace").decode("utf-8")


_SETTINGS = (
    (
        re.compile(r"(raise max_chunk_tokens, shorten the document,|shorten it) or set long_chunks='split'"),
        "send shorter documents, or ask the operator of the server for --long-chunks split",
    ),
    (re.compile(r"raise max_prompt_chunks \((\d+)\) or send fewer"), r"at most \1 are allowed; send fewer"),
    (re.compile(r"raise max_prompt_chunks or send fewer"), "send fewer"),
    (re.compile(r"\bposition_strategy='(\w+)'"), r'"position_strategy": "\1"'),
)
"""Fixes in our errors that refer to Python, and their equivalents for HTTP clients."""
_FIGURES_OF_OTHERS = (
    (re.compile(r", of which \d+ are pinned by others\b"), ", of which others have pinned too many"),
    (re.compile(r": of (\d+) \d+ are free(?: and \d+ may be evicted)?"), r", which has \1"),
    (
        re.compile(r", \d+ are cached and max_chunks is (\d+); \d+ may be evicted"),
        r", max_chunks is \1, and too few may be evicted",
    ),
)
"""Numbers in our errors that reveal what other clients hold, and their replacements."""


def for_clients(message: str) -> str:
    """An error message with fixes available to a client, and without figures of other clients."""
    for known, instead in (*_SETTINGS, *_FIGURES_OF_OTHERS):
        message = known.sub(instead, message)
    return message


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
