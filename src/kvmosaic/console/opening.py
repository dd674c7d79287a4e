"""Opening a model for a command, with a sign of life while it loads."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console

if TYPE_CHECKING:
    from kvmosaic.layout import ChunkContext, PositionStrategy
    from kvmosaic.llm import LLM


@dataclass(frozen=True, slots=True)
class Opening:
    """Which model a command opens, and how."""

    model: str = "reader"
    dtype: str = "auto"
    device: str = "auto"
    position_strategy: PositionStrategy = "shared"
    chunk_context: ChunkContext = "system"
    separator: str = "##"
    long_chunks: Literal["error", "split"] = "error"
    capacity: str = "2GiB"
    enable_chunk_cache: bool = True
    num_threads: int | None = None
    prepack: Literal["auto", "always", "never"] = "auto"
    quantization: Literal["none", "int8"] = "none"
    chunk_tiers: tuple[str, ...] = ()
    chunk_codec: Literal["none", "fp8", "int8", "int4"] = "none"
    chunk_compression: Literal["none", "zstd"] = "none"
    chunk_loading: Literal["auto", "always"] = "auto"
    chunk_pending: str = "512MiB"
    """Most memory for chunks that wait to be written to the tiers."""


def open_llm(opening: Opening, notices: Console) -> LLM:
    """Loads the model; `notices` shows that something happens.

    Raises:
        KVMosaicError: the model cannot be loaded, or a setting cannot work.
    """
    with notices.status(f"loading {opening.model}"), warnings.catch_warnings():
        from kvmosaic.config import ChunkCacheConfig, EngineConfig, TierConfig
        from kvmosaic.console.cache_place import secret_from
        from kvmosaic.llm import LLM
        from kvmosaic.model.quiet import quiet_libraries

        quiet_libraries()
        warnings.filterwarnings("ignore", "the chunk cache is off")  # said below, in one line
        llm = LLM(
            opening.model,
            dtype=opening.dtype,
            device=opening.device,
            prepack=opening.prepack,
            quantization=opening.quantization,
            enable_chunk_cache=opening.enable_chunk_cache,
            chunk_cache_config=ChunkCacheConfig(
                separator=opening.separator,
                position_strategy=opening.position_strategy,
                chunk_context=opening.chunk_context,
                long_chunks=opening.long_chunks,
                capacity=opening.capacity,
            ),
            engine_config=EngineConfig(num_threads=opening.num_threads),
            tier_config=TierConfig(
                tiers=opening.chunk_tiers,
                codec=opening.chunk_codec,
                compression=opening.chunk_compression,
                secret=secret_from() if opening.chunk_tiers else None,
                pending=opening.chunk_pending,
                loading=opening.chunk_loading,
            ),
        )
    if opening.enable_chunk_cache and not llm.has_chunk_cache:
        notices.print(f"the chunk cache is off: {llm.chunk_cache_off_reason}", style="yellow", markup=False)
    return llm
