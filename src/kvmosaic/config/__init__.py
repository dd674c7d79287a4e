"""Settings: frozen dataclasses whose fields carry their help, bounds and choices. To add one, write one field."""

from kvmosaic.config.chunk_cache import ChunkCacheConfig
from kvmosaic.config.llm import (
    ALL_CONFIGS,
    CONFIGS,
    MAX_PRIORITY,
    MAX_TIERS,
    EngineConfig,
    LLMConfig,
    ModelConfig,
    TierConfig,
    configured,
    is_secret_text,
    setting_named,
)
from kvmosaic.config.setting import Setting, Unset, flag_of, parse_bytes, settings_of
from kvmosaic.config.store import MAX_SECONDS, MAX_URL_CHARACTERS, StoreConfig
