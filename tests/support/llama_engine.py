"""Engines over llama.cpp, and the models that they are compared with."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvmosaic.cache import KVCache
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.engine import Engine
from kvmosaic.llama.model import LlamaModel, load_llama
from kvmosaic.llama.runner import LlamaRunner
from kvmosaic.prompt import Prompt
from support.engine_conformance import ask, params
from support.gguf import save_gguf
from support.llama_quantize import KINDS, quantize


class RecordingLlamaRunner(LlamaRunner):
    """A runner that keeps the logits of every step, and checks its cells after it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: list[Tensor] = []

    def run(self, spans: Any) -> Tensor:
        logits = super().run(spans)
        self.check_invariants()
        self.logits.append(torch.from_numpy(logits.copy()))
        return logits


@cache
def reader_file(kind: str = "F32") -> Path:
    """The bundled reader as a GGUF file; rounded by llama.cpp where it has a kind of whole files."""
    path = Path(tempfile.mkdtemp()) / f"reader-{kind}.gguf"
    return quantize(reader_file(), path, kind) if kind in KINDS else save_gguf(path, kind=kind)


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


def documents(seed: int, count: int = 4, length: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 3000, (length + number,), generator=generator).tolist() for number in range(count)]


def logits_of(engine: Engine, prompt: Prompt, strategy: str = "shared") -> Tensor:
    """Logits of the first token of the answer."""
    runner = engine.runner
    assert isinstance(runner, RecordingLlamaRunner)
    runner.logits.clear()
    ask(engine, prompt, params(1), position_strategy=strategy)
    return next(logits for logits in reversed(runner.logits) if len(logits))[-1]


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).pow(2).mean().sqrt() / expected.std())
