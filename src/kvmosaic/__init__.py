"""kvmosaic: language models that answer from documents whose KV cache is computed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.attention import BlockKVCache, KVPiece, composed_attention, paged_attention
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
    "paged_attention",
]

# Names are imported on first use, so that `import kvmosaic` and the command line's --help stay without torch.
_HOMES = {
    "attention": ("BlockKVCache", "KVPiece", "composed_attention", "paged_attention"),
    "config": ("ChunkCacheConfig", "EngineConfig", "TierConfig"),
    "engine": ("AsyncEngine",),
    "errors": ("KVMosaicError",),
    "llm": ("LLM",),
    "prompt": ("Prompt", "Segment", "SegmentKind"),
    "sampling": ("CompletionOutput", "RequestOutput", "SamplingParams", "ScoreOutput", "StructuredOutputs"),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
