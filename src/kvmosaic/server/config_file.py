"""Files that configure the server: small YAML documents, read with care."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from kvmosaic.errors import InvalidConfig

MAX_FILE_BYTES = 2**20


def read_yaml(path: Path) -> Any:
    """The content of a YAML file.

    Raises:
        InvalidConfig: no such file, too large, or not YAML. Its content is never quoted: there may be keys in it.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidConfig(f"{path} has more than {MAX_FILE_BYTES} bytes; a file of settings is smaller")
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"cannot read {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise InvalidConfig(f"{path}{where} is not YAML; write for example 'port: 8000'") from None


def read_config_file(path: Path, names: Iterable[str]) -> dict[str, Any]:
    """Settings by name; dashes in names are read as underscores.

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
        raise InvalidConfig(f"{path}: no setting is called {unknown!r}{nearest(unknown, names)}")
    return settings


def nearest(name: str, names: Iterable[str]) -> str:
    """A hint for a mistyped name: "; did you mean …?", or how to see all."""
    found = get_close_matches(name, list(names), n=1)
    return f"; did you mean {found[0]!r}?" if found else "; see kvmosaic serve --help"
