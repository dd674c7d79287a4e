"""All settings of an `LLM`, from flat names as options, variables and files have them; and those of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from kvmosaic.config.chunk_cache import ChunkCacheConfig
from kvmosaic.config.engine import EngineConfig
from kvmosaic.config.setting import Setting, Unset, setting, settings_of
from kvmosaic.config.tiers import TierConfig

_model = partial(setting, panel="Model")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """How a model is loaded: keyword arguments of `LLM`. `load_model` checks them, since that needs torch."""

    dtype: str = _model(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
        help="Type of the weights and of the cache.",
    )
    device: str = _model("auto", max_length=64, metavar="NAME", help="auto, cpu, cuda or for example cuda:1.")
    prepack: bool | Literal["auto", "always", "never"] = _model(
        "auto",
        help="Keep linear layers in bfloat16 in the order in which a CPU multiplies them, which makes answers about "
        "twice as fast; auto: on CPUs that compute in bfloat16.",
    )
    quantization: Literal["none", "int8"] = _model(
        "none",
        help="int8: linear layers in 8-bit integers, for bfloat16 on a CPU: half the memory, and answers that may "
        "differ.",
    )
    trust_remote_code: bool = _model(False, help="Run Python code that comes with the checkpoint.")
    enable_chunk_cache: bool = _model(
        True, panel="Chunk cache", help="Compose prompts from cached documents; off, they are ordinary prompts."
    )
    profile: bool | str | Path = _model(
        True,
        panel="Chunk cache",
        flag_default="auto",
        max_length=4_096,
        metavar="auto | none | FILE",
        help="What kvmosaic tune found for this model: auto: kvmosaic_profile.json in its folder, if it is there; "
        "none; or a file.",
    )


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
