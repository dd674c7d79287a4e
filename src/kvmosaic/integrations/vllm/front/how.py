"""Composition options of a prompt: position strategy, chunk context and repair."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

from kvmosaic.errors import InvalidConfig
from kvmosaic.integrations.vllm.contract import MAX_REPAIR_TOKENS, Saw, check_choice
from kvmosaic.integrations.vllm.strategy import choices

FIELDS = ("position_strategy", "chunk_context", "repair")
_FIRST = re.compile(r"\s*first\s*\(\s*(\d{1,9})\s*\)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class How:
    """Composition options of one request, or a server's defaults for options that a request omits."""

    position_strategy: str = "auto"
    chunk_context: Saw = "system"
    repair: int | None = None
    """Tokens at the start of each document that are recomputed with everything before them visible; None: the engine's
    default repair, where it can."""

    def __post_init__(self) -> None:
        check_choice("position_strategy", self.position_strategy, choices())
        check_choice("chunk_context", self.chunk_context, get_args(Saw))

    def updated(self, fields: Mapping[str, Any]) -> How:
        """A copy with the fields that are present and not None.

        Raises:
            InvalidConfig: an invalid value.
        """
        given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
        if "repair" in given:
            given["repair"] = read_repair(given["repair"])
        return replace(self, **given)


def read_repair(value: object) -> int:
    """Parses "none", "first(16)" or {"first": 16} into the number of recomputed tokens.

    Raises:
        InvalidConfig: anything else.
    """
    number: object = None
    if value is None or value == "none":
        return 0
    if isinstance(value, str) and (found := _FIRST.fullmatch(value)):
        number = int(found[1])
    elif isinstance(value, Mapping) and set(value) == {"first"}:
        number = value["first"]
    if type(number) is not int or not 0 <= number <= MAX_REPAIR_TOKENS:
        raise InvalidConfig(
            f'repair is {value!r:.80}; write "none", or "first(16)" for the first 16 tokens of each document, at most '
            f"{MAX_REPAIR_TOKENS}"
        )
    return number
