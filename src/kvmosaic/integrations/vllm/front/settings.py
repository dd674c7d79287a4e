"""Front-end settings, from environment variables: `--middleware` takes no arguments; and how a prompt is composed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from kvmosaic.errors import InvalidConfig
from kvmosaic.integrations.vllm.contract import MAX_REPAIR_TOKENS, Saw, check_choice, choices
from kvmosaic.prompt.lead_in import LEAD_IN
from kvmosaic.prompt.separator import read_separator

FIELDS = ("position_strategy", "chunk_context", "repair")
_FIRST = re.compile(r"\s*first\s*\(\s*(\d{1,9})\s*\)\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class How:
    """Composition options of one request, or a server's defaults for options that a request omits."""

    position_strategy: str = "auto"
    chunk_context: Saw = "system"
    repair: int | None = None
    """Tokens at the start of each document that are recomputed with everything before them visible; None: the engine's
    default repair, where it can."""

    def __post_init__(self) -> None:
        check_choice("position_strategy", self.position_strategy, choices())
        check_choice("chunk_context", self.chunk_context, get_args(Saw))

    def updated(self, fields: Mapping[str, Any]) -> How:
        """A copy with the fields that are present and not None.

        Raises:
            InvalidConfig: an invalid value.
        """
        given = {name: fields[name] for name in FIELDS if fields.get(name) is not None}
        if "repair" in given:
            given["repair"] = read_repair(given["repair"])
        return replace(self, **given)


def read_repair(value: object) -> int:
    """Parses "none", "first(16)" or {"first": 16} into the number of recomputed tokens.

    Raises:
        InvalidConfig: anything else.
    """
    number: object = None
    if value is None or value == "none":
        return 0
    if isinstance(value, str) and (found := _FIRST.fullmatch(value)):
        number = int(found[1])
    elif isinstance(value, Mapping) and set(value) == {"first"}:
        number = value["first"]
    if type(number) is not int or not 0 <= number <= MAX_REPAIR_TOKENS:
        raise InvalidConfig(
            f'repair is {value!r:.80}; write "none", or "first(16)" for the first 16 tokens of each document, at most '
            f"{MAX_REPAIR_TOKENS}"
        )
    return number


PREFIX = "KVMOSAIC_"
"""The same prefix and names as for our own server."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Limits and defaults of the front end; the first four are those of a `PromptEncoder`."""

    separator: str | None = None
    """Text that splits a prompt into documents; None or "": prompts are never split."""
    max_chunk_tokens: int = 32_768
    max_prompt_chunks: int = 4_096
    long_chunks: Literal["error", "split"] = "error"
    how: How = field(default_factory=How)
    max_body_bytes: int = 2**26
    documents_dir: Path | None = None
    """Folder of stored documents, which several servers may share; None: in memory."""
    max_documents: int = 10_000
    max_documents_bytes: int = 2**28
    document_ttl: int | None = 3_600
    """Default TTL of a stored document, in seconds; None: no expiry."""

    @property
    def lead_in(self) -> str:
        """Empty, read by `PromptEncoder`: inside vLLM no document has a lead-in."""
        return LEAD_IN

    def __post_init__(self) -> None:
        object.__setattr__(self, "separator", read_separator(self.separator))
        if self.long_chunks not in ("error", "split"):
            raise InvalidConfig(f"long_chunks is {self.long_chunks!r:.80}; choose 'error' or 'split'")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> FrontSettings:
        """Reads the variables that begin with KVMOSAIC_; missing ones have their defaults.

        Raises:
            InvalidConfig: a variable with an invalid value; the message names it.
        """
        said = {name.removeprefix(PREFIX).lower(): value for name, value in environ.items() if value}
        given: dict[str, Any] = {"how": How().updated({name: said[name] for name in FIELDS if name in said})}
        if "chunk_separator" in said:
            given["separator"] = said["chunk_separator"]
        if "long_chunks" in said:
            given["long_chunks"] = cast(Literal["error", "split"], said["long_chunks"])
        if "documents_dir" in said:
            given["documents_dir"] = Path(said["documents_dir"])
        for name, most in (("max_body_bytes", 2**30), ("max_documents", 10**6), ("max_documents_bytes", 2**40)):
            if name in said:
                given[name] = _number(name, said[name], 1, most)
        if "document_ttl" in said:
            given["document_ttl"] = _number("document_ttl", said["document_ttl"], 0, 31_536_000) or None
        return cls(**given)


def _number(name: str, value: str, least: int, most: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 18 and least <= int(value) <= most):
        raise InvalidConfig(f"{PREFIX}{name.upper()} is {value!r:.80}; give a whole number from {least} to {most}")
    return int(value)
