"""Model options of commands, and loading with a progress message."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from kvmosaic.console.text import printable

if TYPE_CHECKING:
    from kvmosaic.layout import ChunkContext
    from kvmosaic.llm import LLM


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model a command loads, and how."""

    model: str = "reader"
    dtype: str = "auto"
    device: str = "auto"
    position_strategy: str | None = None
    """None, here and below: as in the model's profile, or the default."""
    chunk_context: ChunkContext | None = None
    separator: str | None = None
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
    """Maximum memory for chunks that wait to be offloaded."""
    repair: str | None = None
    profile: str = "auto"
    """Which profile of the model to use: auto, none, or a file."""

    def said(self) -> dict[str, Any]:
        """Settings that a profile must not change."""
        settings = {
            "position_strategy": self.position_strategy,
            "chunk_context": self.chunk_context,
            "repair": self.repair,
        }
        return {name: value for name, value in settings.items() if value is not None}


def loading_text(model: str) -> str:
    """Returns the message while a model loads; with the size of a file, as dequantizing takes some seconds per GB."""
    try:
        num_bytes = file.stat().st_size if (file := Path(model).expanduser()).is_file() else 0
    except (OSError, ValueError, RuntimeError):  # an invalid file name
        num_bytes = 0
    size = f", dequantizing {num_bytes / 1e6:,.1f} MB" if num_bytes else ""
    return printable(f"loading {model}{size}")


def open_llm(opening: ModelOptions, notices: Console) -> LLM:
    """Loads the model; `notices` shows progress.

    Raises:
        KVMosaicError: the model cannot be loaded, or a setting cannot work.
    """
    with notices.status(loading_text(opening.model)), warnings.catch_warnings():
        from kvmosaic.config import ChunkCacheConfig, EngineConfig, TierConfig
        from kvmosaic.console.cache.place import secret_from
        from kvmosaic.llm import LLM
        from kvmosaic.model.quiet import quiet_libraries
        from kvmosaic.tuned_settings import profile_choice

        quiet_libraries()
        warnings.filterwarnings("ignore", "the chunk cache is off")  # reported below, in one line
        llm = LLM(
            opening.model,
            dtype=opening.dtype,
            device=opening.device,
            prepack=opening.prepack,
            quantization=opening.quantization,
            enable_chunk_cache=opening.enable_chunk_cache,
            chunk_cache_config=ChunkCacheConfig(
                chunk_separator=opening.separator,
                long_chunks=opening.long_chunks,
                chunk_cache_size=opening.capacity,
                **opening.said(),
            ),
            engine_config=EngineConfig(num_threads=opening.num_threads),
            tier_config=TierConfig(
                chunk_tier=opening.chunk_tiers,
                chunk_codec=opening.chunk_codec,
                chunk_compression=opening.chunk_compression,
                chunk_secret=secret_from() if opening.chunk_tiers else None,
                chunk_pending=opening.chunk_pending,
                chunk_loading=opening.chunk_loading,
            ),
            profile=profile_choice(opening.profile),
        )
    if llm.model.weights_note:
        notices.print(llm.model.weights_note, style="dim", markup=False, highlight=False)
    if llm.profile is not None:
        notices.print(llm.profile_note, style="dim", markup=False, highlight=False)
    if opening.enable_chunk_cache and not llm.has_chunk_cache:
        notices.print(f"the chunk cache is off: {llm.chunk_cache_off_reason}", style="yellow", markup=False)
    return llm
