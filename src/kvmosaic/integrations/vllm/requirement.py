"""Whether vLLM must not start where documents cannot be composed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvmosaic.errors import InvalidConfig

SETTING = "require_composing"
"""Key of `kv_connector_extra_config`."""
VARIABLE = "KVMOSAIC_REQUIRE_COMPOSING"
_VALUES = {"1": True, "true": True, "0": False, "false": False, "": False}


def is_composing_required(extra: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Reads the setting from `kv_connector_extra_config`, or else from the environment.

    Raises:
        InvalidConfig: another value than true or false.
    """
    if SETTING in extra:
        if not isinstance(extra[SETTING], bool):
            raise InvalidConfig(f"{SETTING} is {extra[SETTING]!r:.80} in kv_connector_extra_config; give true or false")
        return bool(extra[SETTING])
    value = environment.get(VARIABLE, "")
    if value.lower() not in _VALUES:
        raise InvalidConfig(f"{VARIABLE} is {value!r:.80}; give 1 or 0")
    return _VALUES[value.lower()]


def require_composing(reason: str) -> None:
    """Raises InvalidConfig if there is a reason why documents cannot be composed."""
    if reason:
        raise InvalidConfig(
            f"documents cannot be composed here, and --require-composing ({VARIABLE}) is set: {reason}. Change that, "
            "or leave the setting out: documents are then part of ordinary prompts"
        )
