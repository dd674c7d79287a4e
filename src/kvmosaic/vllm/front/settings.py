"""Front-end settings, read from environment variables: `--middleware` takes no arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvmosaic.cache import DEFAULT_TENANT
from kvmosaic.documents.database import NO_FOLDER
from kvmosaic.errors import InvalidConfig
from kvmosaic.prompt import PromptOptions
from kvmosaic.prompt.companions import read_companions
from kvmosaic.prompt.patterns import document_finder, read_find_documents
from kvmosaic.prompt.preamble import preamble_rule
from kvmosaic.prompt.separator import read_separator
from kvmosaic.vllm.contract import FIELDS, How

PREFIX = "KVMOSAIC_"
"""The same prefix and names as for our own server."""
TENANT = DEFAULT_TENANT
"""That of our own server without keys: vLLM's keys do not tell clients apart."""
TEXTS: dict[str, Callable[[str], Any]] = {
    "chunk_separator": str,
    "preamble": str,
    "find_documents": str,
    "document_pattern": str,
    "companions": str,
    "long_chunks": str,
    "documents_dir": str,
    "documents_url": str,
}
NUMBERS = {
    "max_chunk_tokens": (1, 10**7),
    "max_section_tokens": (16, 10**7),
    "max_body_bytes": (1, 2**30),
    "max_documents": (1, 10**6),
    "max_documents_bytes": (1, 2**40),
    "document_ttl": (0, 31_536_000),
    "document_version_seconds": (0, 31_536_000),
}
"""Smallest and largest values."""


@dataclass(frozen=True, slots=True)
class FrontSettings(PromptOptions):
    """Limits and defaults of the front end, those of a `PromptEncoder` included."""

    how: How = field(default_factory=How)
    max_body_bytes: int = 2**26
    documents_dir: str | None = NO_FOLDER
    """Folder of stored documents, which several servers may share; `none`: in memory; None: in the user's data folder,
    which is the default of the environment."""
    documents_url: str | None = field(default=None, repr=False)
    """PostgreSQL database of stored documents, in place of a folder."""
    max_documents: int = 10_000
    max_documents_bytes: int = 2**28
    document_ttl: int | None = None
    """Default TTL of a stored document, in seconds; None or 0: no expiry."""
    document_version_seconds: int = 3_600
    """Seconds for which a replaced text stays readable by its version."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "document_ttl", self.document_ttl or None)
        object.__setattr__(self, "chunk_separator", read_separator(self.chunk_separator))
        preamble_rule(self.preamble)
        read_companions(self.companions)
        document_finder(read_find_documents(self.find_documents), self.document_pattern)
        if self.long_chunks not in ("error", "split", "sections"):
            raise InvalidConfig(f"long_chunks is {self.long_chunks!r:.80}; choose 'error', 'split' or 'sections'")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> FrontSettings:
        """Reads the variables that begin with KVMOSAIC_; missing ones have their defaults.

        Raises:
            InvalidConfig, InvalidPreamble: a variable with an invalid value; the message names it.
        """
        said = {name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if value}
        given: dict[str, Any] = {
            "documents_dir": None,
            "how": How().updated({name: said[name] for name in FIELDS if name in said}),
        }
        given |= {name: read(said[name]) for name, read in TEXTS.items() if name in said}
        given |= {name: _number(name, said[name], *bounds) for name, bounds in NUMBERS.items() if name in said}
        return cls(**given)


def _number(name: str, value: str, least: int, most: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 18 and least <= int(value) <= most):
        raise InvalidConfig(f"{PREFIX}{name.upper()} is {value!r:.80}; give a whole number from {least} to {most}")
    return int(value)
