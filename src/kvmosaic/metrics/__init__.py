"""Counters, histograms and gauges, with the names of existing dashboards; a thin layer over prometheus_client."""

from types import ModuleType

from kvmosaic.metrics import own_names, vllm_names
from kvmosaic.metrics.family import Family, Meters, Sample, SampleCollector, expose

__all__ = ["Family", "Meters", "Sample", "SampleCollector", "catalogue", "expose", "own_names", "vllm_names"]


def catalogue() -> tuple[Family, ...]:
    """Every family that the server exports, vLLM's names first, in the order of their modules."""
    return (*_families(vllm_names), *_families(own_names))


def _families(module: ModuleType) -> list[Family]:
    return [value for value in vars(module).values() if isinstance(value, Family)]
