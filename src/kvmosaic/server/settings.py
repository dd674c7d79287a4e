"""Server settings: one model for flags, environment variables and a YAML file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, create_model, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvmosaic.config import ENV_PREFIX, MAX_TIERS, MAX_URL_CHARACTERS, LLMConfig, is_secret_text, variable_of
from kvmosaic.errors import pip_install
from kvmosaic.model.formats import model_help
from kvmosaic.prompt.separator import read_separator
from kvmosaic.server.config_fields import VARIABLE_ONLY, Secrets, config_fields, read_config_file
from kvmosaic.server.tenants import KEY_RULE, is_key_text
from kvmosaic.tiers import Tier, parse_tier_url
from kvmosaic.tuned_settings import profile_choice

if TYPE_CHECKING:
    from kvmosaic.server.tenants import AccessKey

MAX_TEXTS = 1_000
MAX_TEXT_CHARACTERS = 1_024
EXAMPLE_ENDPOINT = "http://localhost:4318/v1/traces"
_OTEL_MODULES = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")

RELOADABLE: Final = frozenset(
    {
        *("api_key", "keys_file", "max_queue", "max_queue_per_tenant", "request_cpu_seconds"),
        *("document_ttl", "max_documents", "max_documents_bytes"),
        *("uvicorn_log_level", "log_format"),
    }
)
"""Settings that SIGHUP changes."""

Texts = Annotated[tuple[str, ...], NoDecode]
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


def _setting(default: Any, panel: str, description: str, **limits: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"panel": panel}, **limits)


def is_variable_only(field: FieldInfo) -> bool:
    """Whether a setting is neither a flag nor a key of a file."""
    return isinstance(field.json_schema_extra, dict) and VARIABLE_ONLY in field.json_schema_extra


_CONFIG_FIELDS: Final = config_fields()
_ConfigSettings: Any = create_model("_ConfigSettings", __base__=BaseSettings, **_CONFIG_FIELDS)  # type: ignore[call-overload]


class ServerSettings(_ConfigSettings):  # type: ignore[misc]
    """All settings of `kvmosaic serve`: those of an `LLM`, from its configurations, and those of the server.

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
    documents: Texts = _setting(
        (),
        "Documents",
        "Files, and folders with their sub-folders, that are stored and computed at the start; of several, ids begin "
        "with the folder's name. Without --documents-dir apart from documents of other servers.",
    )
    served_model_name: Texts = _setting(
        (), "Model", "What clients call the model; several names may be given. Default: MODEL."
    )
    generation_config: Literal["auto", "none"] = _setting(
        "auto",
        "Model",
        "Defaults of sampling: auto: those of the model's generation_config.json; none: OpenAI's.",
    )

    host: str = _setting("127.0.0.1", "Server", "Address to listen on; 0.0.0.0 is every one.", max_length=255)
    port: int = _setting(8_000, "Server", "Port to listen on; 0 takes a free one.", ge=0, le=65_535)
    root_path: str = _setting(
        "", "Server", "Path under which a proxy serves this server.", max_length=1_024, pattern="^(/.*[^/])?$"
    )
    ssl_keyfile: Path | None = _setting(None, "Server", "Private key, for HTTPS.")
    ssl_certfile: Path | None = _setting(None, "Server", "Certificate, for HTTPS.")
    allowed_origins: Texts = _setting(
        (), "Server", "Sites whose pages may call this server (CORS), such as https://example.org; * is every one."
    )
    allowed_hosts: Texts = _setting(
        (),
        "Server",
        "Host names of a server without keys on loopback, besides localhost and its address; * is every one.",
    )
    strict: bool = _setting(
        False,
        "Server",
        "Refuse unknown fields; otherwise they are ignored with a warning, unless one looks mistyped and matters.",
    )
    strict_model_names: bool = _setting(
        False,
        "Server",
        "Refuse other model names, as --strict does, too; otherwise they are answered with a warning.",
    )
    uvicorn_log_level: LogLevel = _setting("info", "Server", "info: a line per request; debug: for probes, too.")
    log_format: Literal["text", "json"] = _setting("text", "Server", "text, or json: an object per line.")
    drain_seconds: float = _setting(
        30.0, "Server", "At SIGTERM, seconds for in-flight requests before they are aborted.", ge=0, le=86_400
    )
    otlp_traces_endpoint: str | None = _setting(
        None,
        "Server",
        f"Where traces are sent (OTLP over HTTP), such as {EXAMPLE_ENDPOINT}. Default: no tracing.",
        max_length=MAX_URL_CHARACTERS,
    )
    config: Path | None = _setting(None, "Server", "A YAML file with any of these settings.")

    warm_on_start: bool = _setting(
        False, "Documents", "Compute stored documents at the start, the newest first, until the cache is full."
    )
    warm_system: str | None = _setting(
        None,
        "Documents",
        "System text of later requests, for --warm-on-start. Default: none.",
        max_length=2**20,
    )

    api_key: Secrets = _setting(
        (), "Access", "A key of this server; several may be given. Better set KVMOSAIC_API_KEY."
    )
    keys_file: Path | None = _setting(None, "Access", "A YAML file of keys with their tenants and quotas.")

    max_queue: int = _setting(256, "Limits", "Maximum of waiting requests; more get 429.", ge=0, le=10**6)
    max_queue_per_tenant: int = _setting(128, "Limits", "Maximum of waiting requests of one tenant.", ge=0, le=10**6)
    request_cpu_seconds: float = _setting(
        30.0,
        "Limits",
        "Maximum processor time for reading one request; more is a 422.",
        ge=0.001,
        le=1e5,
    )

    @field_validator(
        "served_model_name", "allowed_origins", "allowed_hosts", "chunk_tier", "api_key", "adapter", mode="before"
    )
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
        if secret is not None and not is_secret_text(secret.get_secret_value()):
            raise ValueError("must be a text of 8 to 1024 characters; leave it out to have none")
        return secret

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

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _endpoint(cls, value: str | None) -> str | None:
        return read_trace_endpoint(value)

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
        variables = {name: variable_of(name) for name, field in fields if is_variable_only(field)}
        content = read_config_file(Path(named), names, variables)
        return init_settings, env_settings, InitSettingsSource(settings_cls, content)

    def reloaded(self, new: ServerSettings) -> tuple[ServerSettings, tuple[str, ...], tuple[str, ...]]:
        """Returns these settings with new values where they can change while the server runs.

        Also returns the names of settings that have changed, and of settings whose change needs a restart.
        """
        names = [name for name in type(self).model_fields if getattr(self, name) != getattr(new, name)]
        changed = tuple(name for name in names if name in RELOADABLE)
        settings = self.model_copy(update={name: getattr(new, name) for name in changed})
        return settings, changed, tuple(name for name in names if name not in RELOADABLE)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model for clients; replies contain the first one."""
        return self.served_model_name or (self.model,)

    @property
    def tier_urls(self) -> tuple[str, ...]:
        """URLs of the tiers for offloaded chunks, with passwords."""
        return tuple(url.get_secret_value() for url in self.chunk_tier)

    def document_place(self) -> Path | str | None:
        """Returns where documents are stored; see `kvmosaic.documents.document_place`.

        Raises:
            InvalidConfig: a folder and a database are both given.
        """
        from kvmosaic.documents import document_place

        url: SecretStr | None = self.documents_url
        of = self.documents if self.has_own_documents else ()
        return document_place(self.documents_dir, None if url is None else url.get_secret_value(), of)

    @property
    def has_own_documents(self) -> bool:
        """Whether documents are kept apart from those of other servers: the files given, and what is stored later."""
        return bool(self.documents) and self.documents_dir is None and self.documents_url is None

    def llm_config(self, tiers: Sequence[Tier] | None = None) -> LLMConfig:
        """Returns the settings of the `LLM`; `tiers`: tiers that are already open.

        The model's profile may set what was not set here.
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in _CONFIG_FIELDS}
        secret: SecretStr | None = self.chunk_secret
        return LLMConfig.from_values(
            values
            | {
                "profile": profile_choice(self.profile),
                "chunk_tier": tuple(self.tier_urls if tiers is None else tiers),
                "chunk_secret": None if secret is None else secret.get_secret_value(),
            }
        )

    def access_keys(self) -> tuple[AccessKey, ...]:
        """Returns all keys with their tenants, from `api_key` and `keys_file`.

        Raises:
            InvalidConfig: the keys file cannot be used.
        """
        from kvmosaic.server.tenants.keys import keys_of, read_keys_file

        mine = keys_of(key.get_secret_value() for key in self.api_key)
        return mine if self.keys_file is None else read_keys_file(self.keys_file, mine)


def read_trace_endpoint(url: str | None) -> str | None:
    """Checks the URL of an OTLP endpoint, and that spans can be sent.

    Raises:
        ValueError: not the full URL of an endpoint over HTTP, or OpenTelemetry is not installed.
    """
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port above 65535, half an IPv6 address
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        raise ValueError(
            f"must be the URL of an OTLP endpoint over HTTP, such as {EXAMPLE_ENDPOINT} (gRPC is not supported)"
        )
    if "@" in parts.netloc:
        raise ValueError("must have no user and password: set OTEL_EXPORTER_OTLP_HEADERS, which is not logged")
    if not parts.path:
        raise ValueError(f"has no path; collectors take spans at /v1/traces, as in {EXAMPLE_ENDPOINT}")
    if not _is_installed():
        raise ValueError(f"tracing needs OpenTelemetry; install it with: {pip_install('otel')}")
    return url


def _is_installed() -> bool:
    try:
        for name in _OTEL_MODULES:
            import_module(name)
    except ImportError:
        return False
    return True
