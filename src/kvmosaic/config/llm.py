"""Settings of model, engine, tiers and stored documents; and all of an `LLM`, from flat names as files have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from kvmosaic.config.chunk_cache import ChunkCacheConfig
from kvmosaic.config.setting import (
    Setting,
    Unset,
    parse_bytes,
    parse_optional_bytes,
    setting,
    settings_of,
    validate_settings,
)
from kvmosaic.errors import InvalidConfig
from kvmosaic.tools import TOOL_FORMATS

MAX_PRIORITY = 100
"""Max absolute priority of a request."""
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
        help="Keep bfloat16 linear layers in the order in which a CPU multiplies them, about twice as fast; auto: on "
        "CPUs that compute in bfloat16.",
    )
    engine: Literal["auto", "transformers", "llama"] = _model(
        "auto",
        help="transformers, which dequantizes GGUF files, or llama.cpp (llama), which runs them as they are; auto: "
        "llama.cpp for GGUF files where it is installed.",
    )
    kv_cache_dtype: Literal["auto", "f32", "f16", "bf16", "q8_0"] = _model(
        "auto", help="Type of cached keys and values in llama.cpp; auto: f16."
    )
    tool_format: str = _model(
        "auto",
        choices=("auto", *TOOL_FORMATS),
        help="How the model writes tool calls; auto: as its chat template does.",
    )
    adapter: tuple[str, ...] = _model(
        (),
        metavar="[NAME=]FOLDER",
        help="LoRA adapter of kvmosaic adapt or PEFT; several may be given. The first one computes prompts with "
        "documents, the base model ordinary ones.",
    )
    merge_adapter: bool = _model(
        False, help="Add the only adapter to the weights: it computes all prompts, at no cost."
    )
    trust_remote_code: bool = _model(False, help="Run Python code that comes with the checkpoint.")
    enable_chunk_cache: bool = _model(True, panel="Chunk cache", help="Compose prompts from cached documents.")
    profile: bool | str | Path = _model(
        True,
        panel="Chunk cache",
        flag_default="auto",
        max_length=4_096,
        metavar="auto | none | FILE",
        help="Settings that kvmosaic tune found: auto (kvmosaic_profile.json in the model's folder, if it is there), "
        "none, or a file.",
    )


_engine = partial(setting, panel="Engine")
_size = partial(_engine, max_length=32, metavar="SIZE")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How much the engine runs at once."""

    max_num_batched_tokens: int = _engine(
        2_048,
        low=1,
        high=2**20,
        help="Maximum tokens of one step: missing chunks, questions and one token for every running answer.",
    )
    max_num_seqs: int = _engine(64, low=1, high=65_536, help="Maximum of running sequences.")
    max_waiting: int = _engine(100_000, low=1, high=10**7, help="Maximum of waiting requests in the engine.")
    request_cache_size: int | str = _size(
        "1GiB", check=parse_bytes, help="Memory for prefixes, questions and answers, such as 512MiB."
    )
    max_model_len: int | None = _engine(
        None,
        low=1,
        high=2**27,
        panel="Model",
        unset="what the model allows",
        help="Maximum positions of one sequence.",
    )
    enable_prefix_caching: bool = _engine(True, help="Keep blocks for requests that begin alike.")
    enforce_eager: bool = _engine(
        False,
        help="On a GPU, do not replay small steps as CUDA graphs.",
    )
    num_threads: int | None = _engine(
        None,
        low=1,
        high=1024,
        unset="one per core, or the container's limit",
        help="Compute threads on a CPU, of the whole process.",
    )
    preemption: Literal["auto", "recompute", "swap"] = _engine(
        "auto",
        help="Preempted answers: recompute, swap (to host memory and back), or the faster one (auto).",
    )
    swap_space: int | str | None = _size(
        "256MiB",
        check=parse_optional_bytes,
        help="Maximum host memory for preempted answers; 0: recompute.",
    )

    def __post_init__(self) -> None:
        validate_settings(self)
        if self.preemption == "swap" and not self.swap_bytes:
            raise InvalidConfig(
                f"preemption='swap' needs memory of the host, and swap_space is {self.swap_space!r}; give it a size "
                "such as '1GiB', or choose preemption='recompute'"
            )

    @property
    def swap_bytes(self) -> int:
        """`swap_space` in bytes; 0 without it."""
        return parse_optional_bytes(self.swap_space)


MAX_TIERS = 8
MIN_SECRET_CHARACTERS, MAX_SECRET_CHARACTERS = 8, 1024

_tiers = partial(setting, panel="Tiers")
_tier_size = partial(_tiers, max_length=32, metavar="SIZE", check=parse_bytes)


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Where chunks are kept when the device has no room for them, and how."""

    chunk_tier: tuple[str | Any, ...] = _tiers(
        (),
        metavar="URL",
        is_secret=True,
        help="Where chunks are kept beyond the device: host:4GiB, disk:/var/cache/kvmosaic?quota=100GiB, redis://…; "
        "several, the fastest first.",
    )
    chunk_codec: Literal["none", "int8"] = _tiers(
        "none", help="How tiers store numbers: as they are, or in eight bits, which changes answers a little."
    )
    chunk_secret: str | None = _tiers(
        None,
        is_secret=True,
        help="Signs entries of tiers; 8 to 1024 characters.",
    )
    chunk_pending: int | str = _tier_size(
        "512MiB", help="Maximum memory for chunks queued for writing; more are not stored."
    )
    chunk_staged: int | str = _tier_size("512MiB", help="Maximum memory for chunks prefetched for waiting requests.")
    chunk_loading: Literal["auto", "always"] = _tiers(
        "auto",
        help="Load a chunk where that is expected to be faster than computing it, or always.",
    )

    def __post_init__(self) -> None:
        tiers = self.chunk_tier
        if isinstance(tiers, str) or not isinstance(tiers, tuple | list):
            raise InvalidConfig(
                f"chunk_tier must be a list such as ('host:4GiB', 'disk:/path?quota=100GiB'), got {tiers!r}"
            )
        if len(tiers) > MAX_TIERS:
            raise InvalidConfig(f"{len(tiers)} tiers are too many; give at most {MAX_TIERS}")
        object.__setattr__(self, "chunk_tier", tuple(tiers))
        validate_settings(self)
        secret = self.chunk_secret
        if secret is not None and not (isinstance(secret, str) and is_secret_text(secret)):
            given = f"{len(secret):,} characters" if isinstance(secret, str) else type(secret).__name__
            raise InvalidConfig(
                f"chunk_secret must be a text of 8 to 1024 characters, got {given}; leave it out to have none"
            )


def is_secret_text(secret: str) -> bool:
    """Whether a text can be the secret of tiers."""
    return MIN_SECRET_CHARACTERS <= len(secret) <= MAX_SECRET_CHARACTERS


MAX_SECONDS = 366 * 86_400
MAX_URL_CHARACTERS = 2_048

_stored = partial(setting, panel="Documents")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where documents are stored, how many, how long, and the largest body that may hold some."""

    documents_dir: str | None = _stored(
        None,
        max_length=MAX_URL_CHARACTERS,
        metavar="DIR",
        unset="kvmosaic/documents in the user's data folder",
        help="Folder of stored documents, which servers of one machine may share; none: in memory.",
    )
    documents_url: str | None = _stored(
        None,
        is_secret=True,
        max_length=MAX_URL_CHARACTERS,
        help="PostgreSQL database of documents, for several machines: postgresql://USER:PASSWORD@HOST/NAME.",
    )
    document_ttl: int | None = _stored(None, low=1, high=MAX_SECONDS, off="unlimited", help="Default TTL in seconds.")
    document_version_seconds: int = _stored(
        3_600, low=0, high=MAX_SECONDS, help="Seconds that a replaced text is kept after its last use, for its version."
    )
    max_documents: int = _stored(10_000, low=1, high=10**6, help="Maximum stored documents of one tenant.")
    max_documents_bytes: int = _stored(2**28, low=1, high=2**40, help="Maximum bytes of stored texts of one tenant.")
    max_body_bytes: int = setting(2**24, panel="Limits", low=1_024, high=2**30, help="Maximum bytes of a request body.")

    def __post_init__(self) -> None:
        validate_settings(self)


CONFIGS: Final = (ModelConfig, ChunkCacheConfig, TierConfig, EngineConfig)
"""The configurations of an `LLM`."""
ALL_CONFIGS: Final = (*CONFIGS, StoreConfig)
"""No two of them have a field of the same name."""


def setting_named(name: str) -> Setting:
    """The setting with this name, of whichever configuration."""
    return next(settings_of(config)[name] for config in ALL_CONFIGS if name in settings_of(config))


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
            *(configured(config, values) for config in (ModelConfig, ChunkCacheConfig, EngineConfig, TierConfig))
        )

    def keywords(self) -> dict[str, Any]:
        """The keyword arguments of `LLM`."""
        return {each.name: getattr(self.model, each.name) for each in fields(self.model)} | {
            "chunk_cache_config": self.chunk_cache,
            "engine_config": self.engine,
            "tier_config": self.tiers,
        }


_OTHER_NAMES: Final = {
    "cache_policy": "eviction",
    "chunk_cache_gpu_memory_utilization": "chunk_cache_fraction",
    "chunk_hash_algo": "hash_algorithm",
    "chunk_position_strategy": "position_strategy",
    "enable_chunk_aware": "enable_chunk_cache",
    "gpu_memory_utilization": "memory_utilization",
    "log_chunk_cache_stats": "log_stats_seconds",
}
"""Names of the same settings elsewhere."""


def with_settings(settings: Mapping[str, Any], *configs: Any) -> tuple[Any, ...]:
    """The configurations with some of their fields set by name.

    Raises:
        TypeError: none of them has a field of this name.
        InvalidConfig: a value that cannot work.
    """
    kinds: list[Any] = [type(config) for config in configs]
    known = [settings_of(kind) for kind in kinds]
    for name in settings:
        if not any(name in each for each in known):
            nearest = get_close_matches(name, [other for each in known for other in each], 1)
            ours = _OTHER_NAMES.get(name) or next(iter(nearest), None)
            hint = f"; did you mean {ours!r}?" if ours else ""
            raise TypeError(f"LLM has no setting {name!r:.80}{hint}")
    given = ({name: value for name, value in settings.items() if name in each} for each in known)
    return tuple(replace(config, **each) if each else config for config, each in zip(configs, given, strict=True))


def configured(config: type, values: Mapping[str, Any]) -> Any:
    """A configuration from the values that are its fields; see `LLMConfig.from_values`."""
    given = {}
    for name, about in settings_of(config).items():
        if name not in values or (values[name] is None and isinstance(about.default, Unset)):
            continue
        given[name] = None if about.off and values[name] == 0 else values[name]
    return config(**given)
