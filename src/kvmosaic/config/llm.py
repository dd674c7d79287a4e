"""All settings of an `LLM`, from flat names as options, variables and files have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from kvmosaic.config.chunk_cache import ChunkCacheConfig
from kvmosaic.config.engine import EngineConfig
from kvmosaic.config.model import ModelConfig
from kvmosaic.config.setting import Setting, Unset, settings_of
from kvmosaic.config.tiers import TierConfig

CONFIGS: Final = (ModelConfig, ChunkCacheConfig, TierConfig, EngineConfig)
"""The configurations of an `LLM`; no two of them have a field of the same name."""


def setting_named(name: str) -> Setting:
    """The setting with this name, of whichever configuration."""
    return next(settings_of(config)[name] for config in CONFIGS if name in settings_of(config))


@dataclass(frozen=True, slots=True)
class LLMConfig:
    """The four configurations of an `LLM`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    chunk_cache: ChunkCacheConfig = field(default_factory=ChunkCacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tiers: TierConfig = field(default_factory=TierConfig)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> LLMConfig:
        """Sorts values by name into configurations.

        None leaves a default that a model's profile may change, and 0 is None where a setting is switched off by it.

        Raises:
            InvalidConfig: a value that cannot work.
        """
        return cls(
            *(_configured(config, values) for config in (ModelConfig, ChunkCacheConfig, EngineConfig, TierConfig))
        )

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `LLM`."""
        return {each.name: getattr(self.model, each.name) for each in fields(self.model)} | {
            "chunk_cache_config": self.chunk_cache,
            "engine_config": self.engine,
            "tier_config": self.tiers,
        }


def _configured(config: type, values: Mapping[str, Any]) -> Any:
    given = {}
    for name, about in settings_of(config).items():
        if name not in values or (values[name] is None and isinstance(about.default, Unset)):
            continue
        given[name] = None if about.off and values[name] == 0 else values[name]
    return config(**given)
