"""transformers as an engine of `LLM`: see `kvmosaic.assembly.ModelEngine`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvmosaic.attention import AttentionBackend, BackendName, ChosenBackend, PoolName, choose_backend
from kvmosaic.config import EngineConfig
from kvmosaic.engine.self_check import SelfCheck
from kvmosaic.engine.self_check.whole import run_self_check
from kvmosaic.model.load import load_model
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.runner import Runner

max_cells = None
no_codec_reason = ""


def open_model(name: str | Path, *, num_threads: int | None, kv_cache_dtype: str, **options: Any) -> LoadedModel:
    """Loads a model; see `load_model`."""
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    return load_model(name, **options)


def choose_attention(model: LoadedModel, wanted: AttentionBackend | BackendName | None) -> ChosenBackend:
    """The attention backend of a model, and why."""
    return choose_backend(wanted, model.dtype, model.device, has_bias=model.has_bias)


def check_model(model: LoadedModel, config: EngineConfig, backend: AttentionBackend) -> SelfCheck:
    """Compares composed prompts with dense forwards."""
    return run_self_check(model, backend)


def working_cells(num_blocks: Mapping[PoolName, int], block_size: int) -> int:
    """None, since attention reads the pools."""
    return 0


def build_runner(
    model: LoadedModel, num_blocks: Mapping[PoolName, int], block_size: int, config: EngineConfig, backend: Any
) -> Runner:
    """Allocates the pools, and CUDA graphs for decoding where they can be used."""
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    runner = Runner(model, num_blocks, block_size, backend)
    is_special = model.has_bias or model.has_indexers or bool(model.state_layers)
    if model.device.type == "cuda" and not is_special and not config.enforce_eager:
        with suppress(ImportError):  # without Triton
            from kvmosaic.attention.triton.backend import TritonBackend
            from kvmosaic.model.step_graphs import StepGraphs

            if isinstance(backend, TritonBackend):
                runner.graphs = StepGraphs(model, runner.storages, backend)
    return runner
