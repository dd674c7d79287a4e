"""Fields of the server settings that are those of an `LLM`: made from its configurations, never written again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema
from pydantic_settings import NoDecode

from kvmosaic.config import CONFIGS, Setting, Unset, settings_of

VARIABLE_ONLY = "variable_only"
"""Marks a secret: command lines are visible to other users, and settings files are passed around."""
METAVAR = "metavar"
ALIAS = "alias"

Secrets = Annotated[tuple[SecretStr, ...], NoDecode]


def config_fields() -> dict[str, tuple[Any, FieldInfo]]:
    """Returns the type and the field of every setting of the configurations, by name, for `create_model`."""
    shared = ((name, each) for config in CONFIGS for name, each in settings_of(config).items())
    return {name: (_annotation(each), _field(each)) for name, each in shared}


def _field(each: Setting) -> FieldInfo:
    extra: dict[str, Any] = {"panel": each.panel, METAVAR: each.metavar, ALIAS: each.flag_alias}
    if each.is_secret and each.kind is str:
        extra[VARIABLE_ONLY] = True
    is_number = each.kind in (int, float)
    limits: dict[str, Any] = {"ge": each.low, "gt": each.above, "le": each.high, "lt": each.below} if is_number else {}
    if each.off:
        limits |= {"ge": 0, "gt": None}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    default = None if isinstance(each.default, Unset) else each.flag_default or each.default
    found: FieldInfo = Field(default, description=each.flag_help(), json_schema_extra=extra, **given)
    return found


def _annotation(each: Setting) -> Any:
    kind = each.kind
    if kind is tuple:
        return Secrets
    if kind is str and each.is_secret:
        return SecretStr | None
    found: Any = kind
    if each.names():
        found = kind if get_args(kind) else Annotated[str, Choices(each.names)]
    elif kind not in (int, float, bool):
        found = str
        if each.max_length is not None:
            found = Annotated[found, Field(max_length=each.max_length)]
        if each.check is not None:
            found = Annotated[found, AfterValidator(_validator(each))]
    is_optional = isinstance(each.default, Unset) or (each.is_optional and each.default is None)
    return found | None if is_optional else found


def _validator(each: Setting) -> Any:
    def validated(value: str) -> str:
        assert each.check is not None
        each.check(value)
        return value

    return validated


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
