"""Messages for invalid request bodies and parameters, readable without knowing pydantic."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from kvmosaic.prompt.document import ID_PATTERN, ID_RULE
from kvmosaic.tools.request import NAME_PATTERN, NAME_RULE

_SHAPES = {ID_PATTERN: f"must be {ID_RULE}", NAME_PATTERN: f"must be {NAME_RULE}"}
"""Patterns in words; the pattern itself says little to most users."""
_SUBJECT = re.compile(r"^(Input|String|List|Dictionary|Value|Object|JSON|Data) should\b")


@dataclass(frozen=True, slots=True)
class ValidationMessage:
    """One error: the field, such as "messages.0.content" ("": the whole body), and a sentence about it."""

    where: str
    told: str


def validation_message(found: Sequence[Mapping[str, Any]], body: Any = None) -> ValidationMessage:
    """Returns the message for all that pydantic found wrong with `body`.

    That is the first error; in a field of a union type, the error that lies deepest, of the member that was probably
    meant. A mistyped name comes before the name that is missing for it.
    """
    faults = [(_where(each, body), each) for each in found] or [("", {"msg": "invalid", "type": ""})]
    first = faults[0][0]
    inside = [fault for fault in faults if first and f"{fault[0]}.".startswith(f"{first}.")]
    where, fault = max(inside, key=lambda each: each[0].count("."), default=faults[0])
    if fault["type"] == "missing":
        beside = where.rpartition(".")[0]
        unknown = (
            name for name, each in faults if each["type"] == "extra_forbidden" and name.rpartition(".")[0] == beside
        )
        if name := next(unknown, None):
            return _mistyped(name, where)
        return ValidationMessage(
            where, f"{where} is missing" if where else "the body is missing; send a JSON object, at least {}"
        )
    if fault["type"] == "extra_forbidden":
        return ValidationMessage(where, f"unknown field {where!r}; remove it, or look at how it is spelled")
    return ValidationMessage(where, f"{where or 'the body'}: {_said(fault)}")


def _mistyped(unknown: str, missing: str) -> ValidationMessage:
    if get_close_matches(unknown, [missing], n=1):
        return ValidationMessage(unknown, f"unknown field {unknown!r}; did you mean {missing!r}?")
    return ValidationMessage(
        unknown, f"unknown field {unknown!r}, while {missing!r} is missing; look at how it is spelled"
    )


def _where(fault: Mapping[str, Any], body: Any) -> str:
    """Returns the path of a field as it was sent, without pydantic's names of union members."""
    return ".".join(str(part) for part in path_of(fault, body))


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
