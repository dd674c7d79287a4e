"""Server settings: one model for flags, environment variables and a YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvmosaic.config import MAX_TIERS, ChunkCacheConfig, EngineConfig, TierConfig, parse_bytes
from kvmosaic.eviction import POLICIES
from kvmosaic.layout.strategies import describe_strategies, strategy_names
from kvmosaic.model.formats import model_help
from kvmosaic.prompt.separator import read_separator
from kvmosaic.repair import DEFAULT_REPAIR, FORMS, repair_policy
from kvmosaic.repair.parser import MAX_POLICY_CHARACTERS
from kvmosaic.server.choices import Choices
from kvmosaic.server.config_file import read_config_file
from kvmosaic.server.tenants.key_text import KEY_RULE, is_key_text
from kvmosaic.tiers import Tier, parse_tier_url
from kvmosaic.tuned_settings import ProfileChoice, profile_choice

if TYPE_CHECKING:
    from kvmosaic.server.tenants import AccessKey

ENV_PREFIX = "KVMOSAIC_"
MAX_SECONDS = 366 * 86_400.0
MAX_TEXTS = 1_000
MAX_TEXT_CHARACTERS = 1_024
VARIABLE_ONLY = "variable_only"
"""Marks a secret: command lines are visible to other users, and settings files are passed around."""

Texts = Annotated[tuple[str, ...], NoDecode]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode]
Strategy = Annotated[str, Choices(lambda: strategy_names(auto=True, offsets=False))]
Eviction = Annotated[str, Choices(lambda: tuple(POLICIES))]
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


def _setting(default: Any, panel: str, description: str, **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"panel": panel}, **limits)


def is_variable_only(field: FieldInfo) -> bool:
    """Whether a setting is neither a flag nor a key of a file."""
    return isinstance(field.json_schema_extra, dict) and VARIABLE_ONLY in field.json_schema_extra


class ServerSettings(BaseSettings):
    """All settings of `kvmosaic serve`.

    Each field is a flag (`--max-num-seqs`), an environment variable (`KVMOSAIC_MAX_NUM_SEQS`) and a key of the file
    given by `--config` (`max_num_seqs`). The flag wins over the variable, the variable over the file.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)

    model: str = _setting(
        "reader",
        "Model",
        model_help(),
        max_length=4_096,
    )
    served_model_name: Texts = _setting(
        (), "Model", "What clients call the model; several names may be given. Default: MODEL."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = _setting(
        "auto", "Model", "Type of the weights and of the cache."
    )
    device: str = _setting("auto", "Model", "auto, cpu, cuda or for example cuda:1.", max_length=64)
    prepack: Literal["auto", "always", "never"] = _setting(
        "auto",
        "Model",
        "Keep linear layers in bfloat16 in the order in which a CPU multiplies them, which makes answers about twice "
        "as fast; auto: on CPUs that compute in bfloat16.",
    )
    quantization: Literal["none", "int8"] = _setting(
        "none",
        "Model",
        "int8: linear layers in 8-bit integers, for bfloat16 on a CPU: half the memory, and answers that may differ.",
    )
    max_model_len: int | None = _setting(
        None, "Model", "Maximum positions of one sequence. Default: what the model allows.", ge=1, le=2**27
    )
    trust_remote_code: bool = _setting(False, "Model", "Run Python code that comes with the checkpoint.")
    generation_config: Literal["auto", "none"] = _setting(
        "auto",
        "Model",
        "Sampling fields that a request leaves out: auto: as the model's generation_config.json says; none: OpenAI's "
        "defaults.",
    )

    host: str = _setting("127.0.0.1", "Server", "Address to listen on; 0.0.0.0 is every one.", max_length=255)
    port: int = _setting(8_000, "Server", "Port to listen on; 0 takes a free one.", ge=0, le=65_535)
    root_path: str = _setting(
        "", "Server", "Path under which a proxy serves this server.", max_length=1_024, pattern="^(/.*[^/])?$"
    )
    ssl_keyfile: Path | None = _setting(None, "Server", "Private key, for HTTPS.")
    ssl_certfile: Path | None = _setting(None, "Server", "Certificate, for HTTPS.")
    allowed_origins: Texts = _setting(
        (), "Server", "Web sites whose pages may call this server (CORS), such as https://example.org; * is every one."
    )
    allowed_hosts: Texts = _setting(
        (),
        "Server",
        "Names under which this server may be asked for when it has no keys and listens on loopback, besides localhost "
        "and its address; * is every one.",
    )
    uvicorn_log_level: LogLevel = _setting(
        "info", "Server", "What is logged; info: a line per request; debug: for probes, too."
    )
    drain_seconds: float = _setting(
        30.0, "Server", "At SIGTERM, seconds for in-flight requests before they are aborted.", ge=0, le=86_400
    )
    config: Path | None = _setting(None, "Server", "A YAML file with any of these settings.")

    enable_chunk_cache: bool = _setting(
        True, "Chunk cache", "Compose prompts from cached documents; off, they are ordinary prompts."
    )
    chunk_cache_size: str = _setting(
        "2GiB", "Chunk cache", "Memory for cached documents, such as 512MiB.", max_length=32
    )
    gpu_memory_utilization: float | None = _setting(
        None,
        "Chunk cache",
        "Instead of --chunk-cache-size: this fraction of the device's memory, for cached documents only; the model and "
        "the request cache come on top of it.",
        gt=0,
        lt=1,
    )
    position_strategy: Strategy | None = _setting(
        None,
        "Chunk cache",
        f"Documents {describe_strategies(offsets=False)}, or the first where the prompt fits the model's positions, "
        "else the second (auto). Default: as the model's profile says, or auto.",
    )
    chunk_context: Literal["system", "lead_in", "none"] | None = _setting(
        None,
        "Chunk cache",
        "What a document saw when it was computed: the system text, that and a lead-in (a text that is not in the "
        "prompt), or nothing. Default: as the model's profile says, or system.",
    )
    repair: str | None = _setting(
        None,
        "Chunk cache",
        f"Which tokens of cached documents requests compute again: {FORMS}. Default: as the model's profile says, or "
        f"{DEFAULT_REPAIR} where the model can.",
        max_length=MAX_POLICY_CHARACTERS,
    )
    profile: str = _setting(
        "auto",
        "Chunk cache",
        "What kvmosaic tune found for this model: auto: kvmosaic_profile.json in its folder, if it is there; none; or "
        "a file.",
        max_length=4_096,
    )
    chunk_separator: str | None = _setting(
        None, "Chunk cache", "Text that splits a prompt into documents. Default, and '': prompts are never split."
    )
    long_chunks: Literal["error", "split"] = _setting(
        "error", "Chunk cache", "A document that is too long for one chunk: refuse it, or split it."
    )
    eviction: Eviction = _setting("lru", "Chunk cache", "Eviction policy of the chunk cache.")

    chunk_tier: Secrets = _setting(
        (),
        "Tiers",
        "Where chunks are kept beyond the device: host:4GiB, disk:/var/cache/kvmosaic?quota=100GiB, redis://…; several "
        "may be given, the fastest first.",
    )
    chunk_codec: Literal["none", "fp8", "int8", "int4"] = _setting(
        "none", "Tiers", "How numbers are stored there: as they are, or in fewer bits, which changes answers a little."
    )
    chunk_compression: Literal["none", "zstd"] = _setting(
        "none", "Tiers", "Whether entries are compressed further, without loss."
    )
    chunk_loading: Literal["auto", "always"] = _setting(
        "auto",
        "Tiers",
        "Load a chunk where that is expected to be faster than computing it, or wherever a tier has it, which spares "
        "the processor.",
    )
    chunk_pending: str = _setting(
        "512MiB", "Tiers", "Maximum memory for chunks queued for writing; more are not stored.", max_length=32
    )
    chunk_staged: str = _setting(
        "512MiB", "Tiers", "Maximum memory for chunks prefetched for waiting requests.", max_length=32
    )
    chunk_secret: SecretStr | None = Field(
        None,
        description="Without it an entry can be neither made nor changed; 8 to 1024 characters.",
        json_schema_extra={"panel": "Tiers", VARIABLE_ONLY: True},
    )

    max_num_seqs: int = _setting(64, "Engine", "Maximum of running sequences.", ge=1, le=65_536)
    max_num_batched_tokens: int = _setting(2_048, "Engine", "Maximum tokens of one step.", ge=1, le=2**20)
    request_cache_size: str = _setting(
        "1GiB", "Engine", "Memory for prefixes, questions and answers, such as 512MiB.", max_length=32
    )
    block_size: int = _setting(16, "Engine", "Token slots per block of memory.", ge=1, le=4_096)
    enable_prefix_caching: bool = _setting(
        True, "Engine", "Keep the blocks of system texts, questions and answers for requests that begin alike."
    )
    priority_aging_seconds: float = _setting(
        60.0,
        "Engine",
        "Waiting so long counts as much as one more step of priority, so that no request starves; 0: never.",
        ge=0,
        le=1e6,
    )
    preemption_gap: int = _setting(
        10,
        "Engine",
        "A waiting request preempts running ones whose priority is lower by at least this; 0: never.",
        ge=0,
        le=200,
    )
    time_slice_seconds: float = _setting(
        60.0,
        "Engine",
        "An answer with a rolling window that has run so long, or any other that has run ten times as long, is "
        "preempted by a request without room; 0: it runs to its end.",
        ge=0,
        le=1e6,
    )
    preemption: Literal["auto", "recompute", "swap"] = _setting(
        "auto",
        "Engine",
        "Preempted answers: computed again (recompute), moved to host memory and back (swap), or whichever was "
        "measured to be faster (auto).",
    )
    swap_space: str = _setting(
        "256MiB",
        "Engine",
        "Maximum host memory for preempted answers; 0: they are computed again.",
        max_length=32,
    )
    num_threads: int | None = _setting(
        None,
        "Engine",
        "Threads that compute on a CPU. Default: one per core, or fewer where the container may use less.",
        ge=1,
        le=1_024,
    )

    document_ttl: float | None = _setting(
        3_600.0, "Documents", "Lifetime (TTL) of a stored document in seconds; 0: unlimited.", ge=0, le=MAX_SECONDS
    )
    max_documents: int = _setting(10_000, "Documents", "Maximum stored documents of one tenant.", ge=1, le=10**6)
    max_documents_bytes: int = _setting(
        2**28, "Documents", "Maximum bytes of stored texts of one tenant.", ge=1, le=2**40
    )

    api_key: Secrets = _setting(
        (), "Access", "A key that may use this server; several may be given. Better set KVMOSAIC_API_KEY."
    )
    keys_file: Path | None = _setting(None, "Access", "A YAML file of keys with their tenants and quotas.")

    max_queue: int = _setting(256, "Limits", "Maximum of waiting requests; more are refused with 429.", ge=0, le=10**6)
    max_queue_per_tenant: int = _setting(128, "Limits", "Maximum of waiting requests of one tenant.", ge=0, le=10**6)
    max_body_bytes: int = _setting(2**24, "Limits", "Maximum bytes of a request body.", ge=1_024, le=2**30)
    request_cpu_seconds: float = _setting(
        30.0,
        "Limits",
        "Maximum processor time for reading one request: checking, tokenizing, compiling; more is a 422.",
        ge=0.001,
        le=1e5,
    )

    @field_validator("served_model_name", "allowed_origins", "allowed_hosts", "chunk_tier", "api_key", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        """A list, or one text with commas as environment variables have it."""
        texts = value.split(",") if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str | SecretStr) for text in texts):
            raise ValueError("must be a text or a list of texts")
        stripped = [text.strip() if isinstance(text, str) else text for text in texts]
        if len(stripped) > MAX_TEXTS or not all(0 < len(text) <= MAX_TEXT_CHARACTERS for text in stripped):
            raise ValueError(f"must be at most {MAX_TEXTS} texts of 1 to {MAX_TEXT_CHARACTERS} characters each")
        if not all(text.isprintable() for text in stripped if isinstance(text, str)):
            raise ValueError("must be printable, since replies and headers contain it")
        return tuple(stripped)

    @field_validator("api_key")
    @classmethod
    def _sendable(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(is_key_text(key.get_secret_value()) for key in keys):
            raise ValueError(KEY_RULE)
        return keys

    @field_validator("chunk_cache_size", "request_cache_size", "chunk_pending", "chunk_staged")
    @classmethod
    def _size(cls, value: str) -> str:
        parse_bytes(value)
        return value

    @field_validator("swap_space")
    @classmethod
    def _size_or_none(cls, value: str) -> str:
        if value.strip() != "0":
            parse_bytes(value)
        return value

    @field_validator("chunk_tier")
    @classmethod
    def _readable(cls, urls: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        """URLs of tiers, which may hold passwords."""
        if len(urls) > MAX_TIERS:
            raise ValueError(f"{len(urls)} tiers are too many; give at most {MAX_TIERS}")
        for url in urls:
            parse_tier_url(url.get_secret_value())
        return urls

    @field_validator("chunk_secret")
    @classmethod
    def _long_enough(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and not 8 <= len(secret) <= MAX_TEXT_CHARACTERS:
            raise ValueError(f"must be a text of 8 to {MAX_TEXT_CHARACTERS} characters; leave it out to have none")
        return secret

    @field_validator("repair")
    @classmethod
    def _repair(cls, value: str | None) -> str | None:
        if value is not None:
            repair_policy(value)
        return value

    @field_validator("profile")
    @classmethod
    def _profile(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("must be auto, none or the path of a file")
        return value

    @field_validator("chunk_separator")
    @classmethod
    def _separator(cls, value: str | None) -> str | None:
        return read_separator(value)

    @model_validator(mode="after")
    def _both_or_neither(self) -> ServerSettings:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile belong together; give both, or neither")
        if self.chunk_tier and not self.enable_chunk_cache:
            raise ValueError("--chunk-tier needs the chunk cache; leave out --no-enable-chunk-cache, or the tiers")
        if self.preemption == "swap" and self.swap_space.strip() == "0":
            raise ValueError(
                "--preemption swap needs memory; give --swap-space a size, or choose --preemption recompute"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then the file that one of them names."""
        named = init_settings().get("config") or env_settings().get("config")  # which compares names case-insensitively
        if not named:
            return init_settings, env_settings
        names = [name for name, field in cls.model_fields.items() if name != "config" and not is_variable_only(field)]
        fields = cls.model_fields.items()
        variables = {name: ENV_PREFIX + name.upper() for name, field in fields if is_variable_only(field)}
        content = read_config_file(Path(named), names, variables)
        return init_settings, env_settings, InitSettingsSource(settings_cls, content)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model for clients; replies contain the first one."""
        return self.served_model_name or (self.model,)

    @property
    def tier_urls(self) -> tuple[str, ...]:
        """URLs of the tiers for offloaded chunks, with passwords."""
        return tuple(url.get_secret_value() for url in self.chunk_tier)

    def chunk_cache_config(self) -> ChunkCacheConfig:
        """Returns the settings of the chunk cache; the model's profile may set omitted ones."""
        said: dict[str, Any] = {
            "position_strategy": self.position_strategy,
            "chunk_context": self.chunk_context,
            "repair": self.repair,
        }
        return ChunkCacheConfig(
            capacity=self.chunk_cache_size,
            memory_fraction=self.gpu_memory_utilization,
            block_size=self.block_size,
            long_chunks=self.long_chunks,
            separator=self.chunk_separator,
            eviction=self.eviction,
            **{name: value for name, value in said.items() if value is not None},
        )

    def profile_choice(self) -> ProfileChoice:
        """Returns which profile of the model to use."""
        return profile_choice(self.profile)

    def tier_config(self, tiers: Sequence[Tier] | None = None) -> TierConfig:
        """Returns the settings of the tiers; `tiers`: tiers that are already open."""
        return TierConfig(
            tiers=tuple(self.tier_urls if tiers is None else tiers),
            codec=self.chunk_codec,
            compression=self.chunk_compression,
            secret=None if self.chunk_secret is None else self.chunk_secret.get_secret_value(),
            pending=self.chunk_pending,
            staged=self.chunk_staged,
            loading=self.chunk_loading,
        )

    def engine_config(self) -> EngineConfig:
        """Returns the settings of the engine."""
        return EngineConfig(
            max_batched_tokens=self.max_num_batched_tokens,
            max_running=self.max_num_seqs,
            request_cache=self.request_cache_size,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            num_threads=self.num_threads,
            priority_aging_seconds=self.priority_aging_seconds or None,
            preemption_gap=self.preemption_gap or None,
            time_slice_seconds=self.time_slice_seconds or None,
            preemption=self.preemption,
            swap_space=self.swap_space,
        )

    def access_keys(self) -> tuple[AccessKey, ...]:
        """Returns all keys with their tenants, from `api_key` and `keys_file`.

        Raises:
            InvalidConfig: the keys file cannot be used.
        """
        from kvmosaic.server.tenants.keys import keys_of, read_keys_file

        mine = keys_of(key.get_secret_value() for key in self.api_key)
        return mine if self.keys_file is None else read_keys_file(self.keys_file, mine)
