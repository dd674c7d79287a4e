"""kvmosaic: language models that answer from documents whose KV cache is computed once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmosaic.attention import BlockKVCache, KVPiece, composed_attention
    from kvmosaic.config import ChunkCacheConfig, EngineConfig, TierConfig
    from kvmosaic.engine import AsyncEngine
    from kvmosaic.errors import KVMosaicError
    from kvmosaic.llm import LLM
    from kvmosaic.prompt import Prompt, Segment, SegmentKind
    from kvmosaic.sampling import CompletionOutput, RequestOutput, SamplingParams, ScoreOutput, StructuredOutputs

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "BlockKVCache",
    "ChunkCacheConfig",
    "CompletionOutput",
    "EngineConfig",
    "KVMosaicError",
    "KVPiece",
    "Prompt",
    "RequestOutput",
    "SamplingParams",
    "ScoreOutput",
    "Segment",
    "SegmentKind",
    "StructuredOutputs",
    "TierConfig",
    "composed_attention",
]

# Names are imported on first use, so that `import kvmosaic` and the command line's --help stay without torch.
_HOMES = {
    "LLM": "kvmosaic.llm",
    "AsyncEngine": "kvmosaic.engine",
    "BlockKVCache": "kvmosaic.attention",
    "ChunkCacheConfig": "kvmosaic.config",
    "CompletionOutput": "kvmosaic.sampling",
    "EngineConfig": "kvmosaic.config",
    "KVMosaicError": "kvmosaic.errors",
    "KVPiece": "kvmosaic.attention",
    "Prompt": "kvmosaic.prompt",
    "RequestOutput": "kvmosaic.sampling",
    "SamplingParams": "kvmosaic.sampling",
    "ScoreOutput": "kvmosaic.sampling",
    "Segment": "kvmosaic.prompt",
    "SegmentKind": "kvmosaic.prompt",
    "StructuredOutputs": "kvmosaic.sampling",
    "TierConfig": "kvmosaic.config",
    "composed_attention": "kvmosaic.attention",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvmosaic' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
