"""Engines and models for the tests inside vLLM; without vLLM (`make test-vllm` has it) none of them is collected."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.vllm.forking import ForkedEngine

    from kvmosaic import LLM

collect_ignore_glob = ["*"]
if importlib.util.find_spec("vllm"):
    from support.vllm.loading import load_vllm

    load_vllm()  # before any test module imports parts of it, and its warnings become errors
    collect_ignore_glob = []


@pytest.fixture(scope="session")
def vllm_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of one of `support.vllm.models.MODELS`, made when first asked for."""
    from support.vllm.models import make_model

    folder = tmp_path_factory.mktemp("models")
    return lambda name: folder / name if (folder / name).exists() else make_model(name, folder)


@pytest.fixture(scope="module")
def vllm_engine(vllm_model: Callable[[str], Path]) -> Iterator[Callable[..., ForkedEngine]]:
    """`vllm_engine("llama", plugin=True, **options of vllm.LLM)`: one engine per model and options in a module."""
    from support.vllm.forking import ForkedEngine
    from support.vllm.models import ENGINE_OPTIONS

    engines: dict[str, ForkedEngine] = {}

    def engine(name: str, **options: Any) -> ForkedEngine:
        key = json.dumps([name, options], sort_keys=True)
        if key not in engines:
            engines[key] = ForkedEngine(vllm_model(name), **{**ENGINE_OPTIONS.get(name, {}), **options})
        return engines[key]

    yield engine
    for each in engines.values():
        each.stop()


@pytest.fixture(scope="session")
def own_engine(vllm_model: Callable[[str], Path]) -> Callable[..., LLM]:
    """`own_engine("llama", chunk_context="none")`: our own engine over the same folder."""
    from kvmosaic import LLM, ChunkCacheConfig, EngineConfig

    made: dict[str, LLM] = {}

    def engine(name: str, **options: Any) -> LLM:
        key = json.dumps([name, options], sort_keys=True)
        if key not in made:
            made[key] = LLM(
                vllm_model(name),
                dtype="float32",
                # small: every engine of vLLM is a fork of this process
                chunk_cache_config=ChunkCacheConfig(
                    **{"chunk_cache_size": "64MiB", "repair": "none", "chunk_context": "system", **options}
                ),
                engine_config=EngineConfig(request_cache_size="64MiB"),
            )
        return made[key]

    return engine
