"""Settings: frozen dataclasses whose fields carry their help, bounds and choices. To add one, write one field."""

from kvmosaic.config.chunk_cache import ChunkCacheConfig
from kvmosaic.config.llm import (
    CONFIGS,
    MAX_PRIORITY,
    MAX_TIERS,
    EngineConfig,
    LLMConfig,
    ModelConfig,
    TierConfig,
    is_secret_text,
    setting_named,
)
from kvmosaic.config.setting import Setting, Unset, flag_of, parse_bytes, settings_of
