"""Settings: frozen dataclasses whose fields carry their help, bounds and choices. To add one, write one field."""

from kvmosaic.config.chunk_cache import ChunkCacheConfig
from kvmosaic.config.llm import (
    ALL_CONFIGS,
    CONFIGS,
    MAX_PRIORITY,
    MAX_TIERS,
    MAX_URL_CHARACTERS,
    EngineConfig,
    LLMConfig,
    ModelConfig,
    StoreConfig,
    TierConfig,
    configured,
    is_secret_text,
    setting_named,
)
from kvmosaic.config.setting import ENV_PREFIX, Setting, Unset, flag_of, parse_bytes, settings_of, variable_of
