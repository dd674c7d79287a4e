"""Configuration files of the server: YAML read with limits on size and content."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from kvmosaic.errors import InvalidConfig

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
