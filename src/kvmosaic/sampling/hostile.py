"""Hostile grammars: detects grammars whose compilation would take minutes or gigabytes, before compiling them.

llguidance limits its own work by counters, but not while it intersects regular expressions (the number of their common
states is a product) and not while it writes a number's multiples as one. Both are limited here instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from kvmosaic.errors import InvalidSampling

MAX_JOINED_PATTERNS = 6
"""Twelve take half a second and 60 MB, and every further one four times that."""
MAX_PATTERNS = 256
MAX_MULTIPLE = 10_000
"""Least common multiple of all `multipleOf`, without trailing zeros: a state for each remainder."""
_ALTERNATIVES = {"anyOf", "oneOf", "$ref"}
_SAYS_NOTHING = {
    "title",
    "description",
    "default",
    "examples",
    "type",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "$comment",
}
_LITERAL = re.compile(r'"(?:[^"\\\n]++|\\.)*+("?+)|(//)[^\n]*+|/(?:[^/\\\n]++|\\.)*+(/?+)')
"""Also an unterminated one, to the end of its line: a search for its end from each of its quotes takes quadratic time.
A group has the end of a literal, or the beginning of a comment."""


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raises InvalidSampling for a schema that is too costly; other errors are reported by llguidance."""
    patterns: set[str] = set()
    multiples = 1
    joins = ""
    for part in _objects(schema):
        patterns.update(value for name in ("pattern", "format") if isinstance(value := part.get(name), str))
        by_pattern = part.get("patternProperties")
        patterns.update(by_pattern if isinstance(by_pattern, Mapping) else ())
        if "allOf" in part:
            joins = "allOf"
        elif (found := sorted(_ALTERNATIVES & part.keys())) and part.keys() - _SAYS_NOTHING - {found[0]}:
            joins = joins or f"{found[0]} beside other keywords"
        multiples = math.lcm(multiples, _multiple(part.get("multipleOf")))
        if multiples > MAX_MULTIPLE:
            raise InvalidSampling(
                f"multipleOf: the common multiple of all in the JSON schema must be at most {MAX_MULTIPLE} "
                f"(without trailing zeros), got more at {part['multipleOf']!r:.40}; leave it out and check the answer"
            )
    most = MAX_JOINED_PATTERNS if joins else MAX_PATTERNS
    if len(patterns) > most:
        why = f" because {joins} may join them" if joins else ""
        raise InvalidSampling(
            f"the JSON schema has {len(patterns)} patterns and formats; at most {most} can be used{why}"
        )


def check_grammar(lark: str) -> None:
    """Raises InvalidSampling for a Lark grammar that intersects too much, or that contains a JSON schema."""
    bare = _LITERAL.sub(_left_of_literal, lark)
    if "%json" in bare:
        raise InvalidSampling("grammar: %json cannot be used; give the schema as `json`")
    joins = bare.count("&") + bare.count("~")
    if joins > MAX_JOINED_PATTERNS:
        raise InvalidSampling(f"grammar: at most {MAX_JOINED_PATTERNS} uses of & and ~ are allowed, got {joins}")


def _left_of_literal(literal: re.Match[str]) -> str:
    """Replacement of a literal: nothing, or its text if unterminated, which llguidance may parse as anything."""
    return " " if any(literal.groups()) else literal[0]


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _objects(part)


def _multiple(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return 1
    number = Decimal(repr(value))
    return abs(int("".join(map(str, number.as_tuple().digits)).rstrip("0") or 1)) if number.is_finite() else 1
