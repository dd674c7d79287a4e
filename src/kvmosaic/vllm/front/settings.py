"""Front-end settings, read from environment variables: `--middleware` takes no arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmosaic.config import (
    ChunkCacheConfig,
    StoreConfig,
    configured,
    setting_named,
    settings_of,
    variable_of,
)
from kvmosaic.documents.database import NO_FOLDER
from kvmosaic.vllm.contract import FIELDS, How

PROMPT_SETTINGS = (
    *("chunk_separator", "long_chunks", "max_chunk_tokens", "max_section_tokens", "max_prompt_chunks"),
    *("preamble", "find_documents", "document_pattern", "companions"),
)
"""Fields of `ChunkCacheConfig` that decide what documents of a prompt are."""


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
        values = {"documents_dir": NO_FOLDER, "max_body_bytes": 2**26, **values}  # images are sent to vLLM, too
        prompts = {name: value for name, value in values.items() if name in PROMPT_SETTINGS}
        return cls(configured(ChunkCacheConfig, prompts), configured(StoreConfig, values), How().updated(values))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> FrontSettings:
        """Reads the variables that begin with KVMOSAIC_; missing ones have their defaults.

        Raises:
            InvalidConfig, InvalidPreamble: a variable with an invalid value; the message names it.
        """
        known = (*FIELDS, *PROMPT_SETTINGS, *settings_of(StoreConfig))
        given: dict[str, Any] = {name: value for name in known if (value := environ.get(variable_of(name)))}
        for name in given.keys() - FIELDS:
            given[name] = setting_named(name).parse(variable_of(name), given[name])
        return cls.of(**{"documents_dir": None, **given})
