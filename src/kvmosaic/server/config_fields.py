"""Fields of the server settings that are those of an `LLM`, made from its configurations; and YAML files of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args

import yaml
from pydantic import AfterValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticKnownError, core_schema
from pydantic_settings import NoDecode

from kvmosaic.config import ALL_CONFIGS, Setting, Unset, settings_of
from kvmosaic.errors import InvalidConfig

VARIABLE_ONLY = "variable_only"
"""Marks a secret: command lines are visible to other users, and settings files are passed around."""
METAVAR = "metavar"
ALIAS = "alias"

Secrets = Annotated[tuple[SecretStr, ...], NoDecode]


def config_fields() -> dict[str, tuple[Any, FieldInfo]]:
    """Returns the type and the field of every setting of the configurations, by name, for `create_model`."""
    shared = ((name, each) for config in ALL_CONFIGS for name, each in settings_of(config).items())
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


MAX_FILE_BYTES = 2**20


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """PyYAML's safe loader that refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(names) != len(set(names)):
            raise yaml.constructor.ConstructorError(problem="a name is given twice", problem_mark=node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path) -> Any:
    """Returns the content of a YAML file.

    Raises:
        InvalidConfig: no such file, too large, or not YAML. The message never quotes the content, which may hold keys.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)  # the size of a device file says nothing
    except (OSError, ValueError) as error:  # a path with a NUL raises ValueError
        raise InvalidConfig(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise InvalidConfig(f"{path} has more than {MAX_FILE_BYTES} bytes; a file of settings is smaller")
    try:
        return yaml.load(content.decode("utf-8"), _Loader)  # noqa: S506 (it is a safe one)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # invalid dates raise ValueError
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise InvalidConfig(f"{path}{where} is not YAML; write for example 'port: 8000'") from None


def read_config_file(path: Path, names: Iterable[str], variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Reads settings by name; dashes in names become underscores.

    Args:
        path: path of the file.
        names: allowed names.
        variables: settings that are not allowed in a file, each with the environment variable to use instead.

    Raises:
        InvalidConfig: not a mapping, or a name that no setting has.
    """
    content = read_yaml(path)
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InvalidConfig(f"{path} must map names of settings to values, such as 'port: 8000'")
    settings = {key.replace("-", "_"): value for key, value in content.items()}
    if unknown := next((name for name in settings if name not in set(names)), None):
        if variable := (variables or {}).get(unknown):
            raise InvalidConfig(f"{path}: {unknown!r} is no setting of a file; set the variable {variable}")
        raise InvalidConfig(f"{path}: no setting is called {unknown!r}{nearest(unknown, names)}")
    return settings


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a hint for a mistyped name: "; did you mean …?", or how to list all names."""
    found = get_close_matches(name, list(names), n=1)
    return f"; did you mean {found[0]!r}?" if found else "; see kvmosaic serve --help-all"
