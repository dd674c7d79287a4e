"""Reading of settings: errors in one line, by the name that was used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from kvmosaic import config
from kvmosaic.config import ENV_PREFIX, variable_of
from kvmosaic.errors import InvalidConfig
from kvmosaic.server.config_fields import nearest
from kvmosaic.server.settings import ServerSettings

ARGUMENTS = ("model", "documents")
"""Settings that are arguments of the command, not options."""
_SECRETS = {"api_key", "chunk_secret", "chunk_tier"}
_LIMITS = {
    "greater_than_equal": "at least {ge:g}",
    "greater_than": "above {gt:g}",
    "less_than_equal": "at most {le:g}",
    "less_than": "below {lt:g}",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "literal_error": "{expected}",
    "string_too_long": "at most {max_length} characters long",
    "string_type": "a text",
    "finite_number": "a finite number",
}


def read_settings(flags: Mapping[str, Any] | None = None) -> ServerSettings:
    """Reads settings from flags, `KVMOSAIC_` variables and the YAML file that one of them names, in this order.

    Raises:
        InvalidConfig: an unknown name or a value outside its limits; never with a secret in its message.
    """
    flags = flags or {}
    _check_environment()
    try:
        return ServerSettings(**flags)
    except ValidationError as error:
        raise InvalidConfig("; ".join(_message(each, flags) for each in error.errors(include_url=False))) from None


def flag_of(name: str) -> str:
    """Returns the flag of a setting."""
    return name.upper() if name in ARGUMENTS else config.flag_of(name)


def _check_environment() -> None:
    elsewhere = ("attention", "cpu_isa", "cache_dir")  # read when a model is loaded
    known = [variable_of(name) for name in (*ServerSettings.model_fields, *elsewhere)]
    for variable in os.environ:
        if variable.upper().startswith(ENV_PREFIX) and variable.upper() not in known:
            raise InvalidConfig(f"no setting is called {variable}{nearest(variable.upper(), known)}")


def _message(error: Any, flags: Mapping[str, Any]) -> str:
    if not error["loc"]:
        return str(error["ctx"]["error"])
    name = str(error["loc"][0])
    variables = {variable.upper(): value for variable, value in os.environ.items()}
    file = flags.get("config") or variables.get(variable_of("config"))
    source = f"{file}: {name}" if file else name
    if name in flags or variable_of(name) in variables:
        source = flag_of(name) if name in flags else variable_of(name)
    shown = "" if name in _SECRETS else f" is {error['input']!r:.100};"
    if error["type"] in _LIMITS:
        limit = _LIMITS[error["type"]].format_map(error.get("ctx", {}))
        return f"{source}{shown} it must be {limit}"
    cause = str(error.get("ctx", {}).get("error") or error["msg"])
    if shown:
        cause = cause.removeprefix(f"{name} is {error['input']!r:.80}; ")
        cause = f"it {cause}" if cause.startswith(("must ", "has ")) else cause
    colon = "" if shown or cause.startswith("must ") else ":"
    return f"{source}{shown}{colon} {cause}"
