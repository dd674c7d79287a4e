"""llama.cpp as an engine of `LLM`: see `kvmosaic.assembly.Engine`. It needs no torch until a tier takes chunks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvmosaic.attention import ChosenBackend, PoolName
from kvmosaic.config import EngineConfig
from kvmosaic.container import compute_threads, this_machine
from kvmosaic.engine.self_check import SelfCheck
from kvmosaic.errors import InvalidConfig
from kvmosaic.llama.interface import is_installed
from kvmosaic.llama.model import LlamaModel, geometry_of_file, gpu_layers_of, load_llama
from kvmosaic.llama.runner import LlamaRunner
from kvmosaic.llama.self_check import check_llama

max_cells = 32_768
"""Of requests, and of documents: each row looks at all that are in use. Other cached documents wait in host memory."""
no_codec_reason = "chunks of llama.cpp also have positions; leave it out, or cache fewer bits by kv_cache_dtype"


__all__ = ["geometry_of_file", "is_installed"]  # parts of an engine, too


def open_model(
    name: str | Path, *, device: str, max_positions: int | None, kv_cache_dtype: str, **_: Any
) -> LlamaModel:
    """Loads a GGUF file; see `load_llama`."""
    return load_llama(
        Path(name).expanduser(),
        max_positions=max_positions,
        kv_cache_dtype=kv_cache_dtype,
        gpu_layers=gpu_layers_of(device),
    )


def choose_attention(model: LlamaModel, wanted: object) -> ChosenBackend:
    """Its own attention.

    Raises:
        InvalidConfig: another one was asked for.
    """
    if wanted is not None:
        raise InvalidConfig("attention_backend is for transformers: llama.cpp has its own; leave it out")
    return ChosenBackend(None, model.engine_name, "its own kernels; our backends are not used")


def check_model(model: LlamaModel, config: EngineConfig, backend: object) -> SelfCheck:
    """Compares composed prompts with ordinary ones; see `check_llama`."""
    return check_llama(model, num_threads=_num_threads(config))


def working_cells(num_blocks: Mapping[PoolName, int], block_size: int) -> int:
    """All of the requests, and those of as many documents as `max_cells` allows."""
    return num_blocks["request"] * block_size + min(num_blocks["chunk_cache"] * block_size, max_cells)


def build_runner(
    model: LlamaModel, num_blocks: Mapping[PoolName, int], block_size: int, config: EngineConfig, backend: object
) -> LlamaRunner:
    """Allocates the cells."""
    return LlamaRunner(
        model,
        num_blocks,
        block_size,
        max_moved=min(model.max_positions, num_blocks["chunk_cache"] * block_size),
        num_threads=_num_threads(config),
        max_cells=working_cells(num_blocks, block_size),
        max_rows=config.max_num_batched_tokens,
    )


def _num_threads(config: EngineConfig) -> int:
    """Compute threads: as many as are asked for, by OMP_NUM_THREADS as elsewhere, or one for each core."""
    stated = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return config.num_threads or (int(stated) if stated.isdecimal() else 0) or compute_threads(this_machine())
