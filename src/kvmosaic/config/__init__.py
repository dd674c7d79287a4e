"""Settings: frozen dataclasses whose fields carry their help, bounds and choices. To add one, write one field."""

from kvmosaic.config.chunk_cache import ChunkCacheConfig
from kvmosaic.config.engine import EngineConfig
from kvmosaic.config.llm import CONFIGS, LLMConfig, setting_named
from kvmosaic.config.model import ModelConfig
from kvmosaic.config.setting import Setting, Unset, flag_of, parse_bytes, settings_of
from kvmosaic.config.tiers import MAX_TIERS, TierConfig, is_secret_text

__all__ = [
    "CONFIGS",
    "MAX_TIERS",
    "ChunkCacheConfig",
    "EngineConfig",
    "LLMConfig",
    "ModelConfig",
    "Setting",
    "TierConfig",
    "Unset",
    "flag_of",
    "is_secret_text",
    "parse_bytes",
    "setting_named",
    "settings_of",
]
