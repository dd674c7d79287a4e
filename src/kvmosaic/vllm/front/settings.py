"""Front-end settings, read from environment variables: `--middleware` takes no arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmosaic.cache import DEFAULT_TENANT
from kvmosaic.config import ChunkCacheConfig, StoreConfig, configured, setting_named, settings_of
from kvmosaic.documents.database import NO_FOLDER
from kvmosaic.vllm.contract import FIELDS, How

PREFIX = "KVMOSAIC_"
"""The same prefix and names as for our own server."""
TENANT = DEFAULT_TENANT
"""That of our own server without keys: vLLM's keys do not tell clients apart."""
PROMPT_SETTINGS = (
    *("chunk_separator", "long_chunks", "max_chunk_tokens", "max_section_tokens", "max_prompt_chunks"),
    *("preamble", "find_documents", "document_pattern", "companions"),
)
"""Fields of `ChunkCacheConfig` that decide what documents of a prompt are."""
_OWN_DEFAULTS = {"max_body_bytes": 2**26}  # images are sent to vLLM, too


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Settings of the front end: of prompts, of stored documents, and how requests that say nothing are composed."""

    prompts: ChunkCacheConfig
    store: StoreConfig
    how: How

    @classmethod
    def of(cls, **values: Any) -> FrontSettings:
        """Settings by name; documents are stored in memory, if nothing else is said.

        Raises:
            InvalidConfig, InvalidPreamble: a value that cannot work.
        """
        values = {"documents_dir": NO_FOLDER, **_OWN_DEFAULTS, **values}
        prompts = {name: value for name, value in values.items() if name in PROMPT_SETTINGS}
        return cls(configured(ChunkCacheConfig, prompts), configured(StoreConfig, values), How().updated(values))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> FrontSettings:
        """Reads the variables that begin with KVMOSAIC_; missing ones have their defaults.

        Raises:
            InvalidConfig, InvalidPreamble: a variable with an invalid value; the message names it.
        """
        said = {name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if value}
        known = {*PROMPT_SETTINGS, *settings_of(StoreConfig)}
        given: dict[str, Any] = {name: said[name] for name in FIELDS if name in said}
        for name in known & set(said):
            given[name] = setting_named(name).parse(PREFIX + name.upper(), said[name])
        return cls.of(**{"documents_dir": None, **given})
