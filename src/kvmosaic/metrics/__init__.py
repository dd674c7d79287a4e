"""Counters, histograms and gauges, with the names of existing dashboards; a thin layer over prometheus_client."""

from kvmosaic.metrics import own_names, vllm_names
from kvmosaic.metrics.catalogue import catalogue
from kvmosaic.metrics.exposition import expose
from kvmosaic.metrics.family import Family
from kvmosaic.metrics.meters import Meters, Sample, SampleCollector

__all__ = ["Family", "Meters", "Sample", "SampleCollector", "catalogue", "expose", "own_names", "vllm_names"]
