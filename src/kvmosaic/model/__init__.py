"""transformers models: loading, detection of their attention layers, and access to their attention."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmosaic.model.hook import ATTENTION_NAME, Receiver, attention_scope, install
    from kvmosaic.model.load import load_model
    from kvmosaic.model.loaded import LoadedModel

__all__ = ["ATTENTION_NAME", "LoadedModel", "Receiver", "attention_scope", "install", "load_model"]

# Names are imported on first use: the command line reads the names of formats, and needs no torch for its help.
_HOMES = {
    "hook": ("ATTENTION_NAME", "Receiver", "attention_scope", "install"),
    "load": ("load_model",),
    "loaded": ("LoadedModel",),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'kvmosaic.model' has no attribute {name!r}")
    return getattr(import_module(f"kvmosaic.model.{home}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
