"""Stand-in for torchvision, whose builds fail beside torch for CPUs: models import it, and text calls none of it."""

from __future__ import annotations

import sys
import types
from typing import Any

__version__ = "0.0"


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Any,), {})


class _Any(metaclass=_Kind):
    pass


class _Names(types.ModuleType):
    """A module that has every name."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Any,), {})


for _name in (
    "transforms",
    "transforms.v2",
    "transforms.v2.functional",
    "transforms.functional",
    "io",
    "ops",
    "tv_tensors",
):
    _module = sys.modules[f"{__name__}.{_name}"] = _Names(f"{__name__}.{_name}")
    _parent, _, _child = f"{__name__}.{_name}".rpartition(".")
    setattr(sys.modules[_parent], _child, _module)
