"""Metric catalogue: every family that the server exports."""

from __future__ import annotations

from types import ModuleType

from kvmosaic.metrics import own_names, vllm_names
from kvmosaic.metrics.family import Family


def catalogue() -> tuple[Family, ...]:
    """All families, vLLM's names first, in the order of their modules."""
    return (*_families(vllm_names), *_families(own_names))


def _families(module: ModuleType) -> list[Family]:
    return [value for value in vars(module).values() if isinstance(value, Family)]
