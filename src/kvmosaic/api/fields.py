"""Field types of request bodies: every number, text and list with a bound."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

NEEDLESS: Final = "needless"
"""The type of the error of a field without which the answer is right."""
MAX_TEXT = 2**25
MAX_NAME = 4_096
MAX_DOCUMENTS = 4_096
MAX_TOKEN_ID = 2**32 - 1
MAX_PROMPT_TOKENS = 2**22
MAX_ANSWER_TOKENS = 2**27
_MAX_DEPTH = 32
_MAX_ITEMS = 10_000
_MAX_VARIABLES = 64


class Body(BaseModel):
    """A part of a request: texts for numbers and numbers for texts are refused, and unknown fields are faults."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def example(**fields: Any) -> ConfigDict:
    """Returns the model configuration of a body that shows this example."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class Reply(BaseModel):
    """A part of a reply; what is not set is not sent."""


def unsupported(reason: str, *, matters: bool = True) -> PydanticCustomError:
    """Returns the error of a part that is known but not supported; see `Only`."""
    return PydanticCustomError(
        "unsupported" if matters else NEEDLESS, "not supported: {reason}; leave it out", {"reason": reason}
    )


@dataclass(frozen=True, slots=True)
class Only:
    """A field that is known but not supported: its default is accepted, any other value is refused with the reason.

    Where the answer is right without it (`matters=False`), routes that leave unknown fields out leave it out, too, and
    warn of it. Fields that change nothing in the answer are `Ignored` instead.
    """

    allowed: tuple[Any, ...]
    reason: str
    matters: bool = True

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.allowed), "description": f"Not supported: {self.reason}."}

    def _check(self, value: Any) -> Any:
        if any(value == known and type(value) is type(known) for known in self.allowed):
            return value
        raise unsupported(self.reason, matters=self.matters)


def check_plain(value: Any) -> Any:
    """Accepts JSON that is not too deep and not too large, and whose numbers are finite."""
    _count_items(value, 0, [0])
    return value


def _count_items(value: Any, depth: int, count: list[int]) -> None:
    count[0] += 1
    if depth > _MAX_DEPTH or count[0] > _MAX_ITEMS:
        raise PydanticCustomError(
            "too_large", "is nested deeper than {depth} levels or has more than {items} items",
            {"depth": _MAX_DEPTH, "items": _MAX_ITEMS},
        )  # fmt: skip
    if isinstance(value, float) and not math.isfinite(value):
        raise PydanticCustomError("finite_number", "holds a number that is not finite")
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_text(key)
            _count_items(item, depth + 1, count)
    elif isinstance(value, list):
        for item in value:
            _count_items(item, depth + 1, count)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("string_unicode", "holds half of a surrogate pair, which is no character") from None


def _whole(value: Any) -> Any:
    return int(value) if type(value) is float and value.is_integer() else value


def _token_ids(value: Any, each_id: ValidatorFunctionWrapHandler) -> Any:
    """Checks all ids at once; one after another only to find what is wrong, or to accept 4.0 as 4.

    Prompts have hundreds of thousands of ids, and the check runs on the event loop.
    """
    if type(value) is not list or not {int}.issuperset(map(type, value)):
        return each_id(value)
    try:
        array("I", value)  # numbers from 0 to 2**32 - 1
    except OverflowError:
        return each_id(value)
    return value


INTEGRAL = BeforeValidator(_whole)
"""Accepts 4.0 as 4, as JSON Schema does."""
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(max_length=MAX_NAME)]
Plain = Annotated[dict[str, Any], Field(max_length=_MAX_ITEMS), AfterValidator(check_plain)]
"""A JSON object defined by the client."""
Variables = Annotated[dict[str, Any], Field(max_length=_MAX_VARIABLES), AfterValidator(check_plain)]
"""Variables of a chat template."""
Ignored = Annotated[
    Any, AfterValidator(check_plain), Field(description="Accepted and ignored: it changes nothing in the answer.")
]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID), INTEGRAL]
TokenIds = Annotated[list[TokenId], WrapValidator(_token_ids), Field(max_length=MAX_PROMPT_TOKENS)]
NumTokens = Annotated[Annotated[int, Field(ge=1, le=MAX_ANSWER_TOKENS)] | Annotated[int, Field(ge=-1, le=-1)], INTEGRAL]
"""-1: no limit."""
_StopText = Annotated[str, Field(max_length=4_096)]


def _said_stops(stop: str | list[str] | None) -> str | list[str] | None:
    return ([each for each in stop if each] if isinstance(stop, list) else stop) or None


_Stops = Annotated[list[_StopText], Field(max_length=128)]
StopTexts = Annotated[_Stops | None, AfterValidator(_said_stops)]
"""Stop texts without empty ones, which some clients send where nothing is set."""
StopField = Annotated[_StopText | _Stops | None, AfterValidator(_said_stops)]
"""The same, or one text."""
