"""Parts of grammars in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SPACED = {"whitespace_flexible": False, "lenient": False, "item_separator": ", ", "key_separator": ": "}
"""A space after commas and colons, as chat templates write the calls of earlier turns."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A part of a grammar among literal texts."""

    lark: str


Parts = Sequence[str | Rule]
"""Literal texts and grammar rules, in order."""


def json_rule(schema: object) -> Rule:
    """JSON of a schema."""
    given: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    return Rule(f"%json {json.dumps({**given, 'x-guidance': _SPACED}, ensure_ascii=False)}")
