"""Conformance of vLLM with our plugin, inside the fork where it runs."""

from __future__ import annotations

from functools import cache

import torch

from kvmosaic.model import LoadedModel, load_model
from support.engine_conformance import Reference, run_case
from support.vllm.engine import VLLMEngine
from support.vllm.inside import Inside


@cache
def _model(folder: str) -> LoadedModel:
    return load_model(folder, device="cpu", dtype="float32")


def conforms(engine: Inside, case: str, folder: str) -> None:
    """Runs one case on an engine with an empty cache."""
    assert engine.llm.reset_prefix_cache()
    torch.manual_seed(0)
    run_case(case, VLLMEngine(engine.llm), Reference(_model(folder), 1e-3))
