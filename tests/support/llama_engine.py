"""Engines over llama.cpp, and the models that they are compared with."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from kvmosaic.cache import KVCache
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.engine import Engine
from kvmosaic.llama.model import LlamaModel, load_llama
from kvmosaic.llama.runner import LlamaRunner
from support.gguf import save_gguf


class RecordingLlamaRunner(LlamaRunner):
    """A runner that keeps the logits of every step, and checks its cells after it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: list[Tensor] = []

    def run(self, spans: Any, copies: Any = ()) -> Tensor:
        logits = super().run(spans, copies)
        self.check_invariants()
        self.logits.append(logits)
        return logits


@cache
def reader_file(kind: str = "F32") -> Path:
    """The bundled reader as a GGUF file."""
    return save_gguf(Path(tempfile.mkdtemp()) / f"reader-{kind}.gguf", kind=kind)


@cache
def llama_reader(kind: str = "F32", kv_cache_dtype: str = "f32") -> LlamaModel:
    return load_llama(reader_file(kind), kv_cache_dtype=kv_cache_dtype)


def llama_engine(
    model: LlamaModel,
    *,
    blocks: tuple[int, int] = (128, 128),
    max_moved: int = 512,
    max_cells: int | None = None,
    num_sequences: int = 64,
    num_threads: int = 1,
    max_rows: int = 64,
    prefix_caching: bool = True,
    engine_options: dict[str, Any] | None = None,
    **chunk_options: Any,
) -> Engine:
    """An engine with small pools."""
    config = ChunkCacheConfig(**{"block_size": 4, "position_strategy": "shared", "repair": "none", **chunk_options})
    runner = RecordingLlamaRunner(
        model,
        {"request": blocks[0], "chunk_cache": blocks[1]},
        config.block_size,
        max_moved=max_moved,
        max_cells=max_cells,
        num_threads=num_threads,
        num_sequences=num_sequences,
        max_rows=max_rows,
    )
    kv_cache = KVCache(
        model.fingerprint,
        config,
        request_blocks=blocks[0],
        chunk_blocks=blocks[1],
        prefix_caching=prefix_caching,
    )
    return Engine(runner, kv_cache, config, EngineConfig(**(engine_options or {})))  # type: ignore[arg-type]
