"""Choices of settings and fields from a dict of names, which may grow: a strategy, an eviction policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema


@dataclass(frozen=True, slots=True)
class Choices:
    """Annotation of a text: one of the names that a function returns, at the time of the request."""

    names: Callable[[], tuple[str, ...]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(schema) | {"enum": list(self.names())}

    def _checked(self, value: str) -> str:
        names = self.names()
        if value not in names:
            *others, last = map(repr, names)
            raise PydanticKnownError(
                "literal_error", {"expected": f"{', '.join(others)} or {last}" if others else last}
            )
        return value
