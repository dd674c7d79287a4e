"""Variants of a replay: what a document's cache key depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvmosaic.layout import ChunkContext


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to cache the prompts of a trace."""

    name: str
    about: str
    """In tables: what documents see, so that they are found after it only."""
    preamble: Literal["all", "first", "auto"] = "all"
    """What documents see of the system text: all, its first block, or what the rule "auto" finds in its text."""
    chunk_context: ChunkContext = "system"
    is_plain: bool = False
    """Whether prompts are ordinary ones, for the prefix cache alone."""


PREFIX_ONLY = Variant("prefix", "prefix caching only", is_plain=True)
FIRST_BLOCK = Variant("first-block", "its first block", "first")
VARIANTS = (
    PREFIX_ONLY,
    Variant("system", "the whole system text"),
    FIRST_BLOCK,
    Variant("auto", "it, up to the first date", "auto"),
    Variant("companions", "it, and a companion", "auto", chunk_context="companions"),
    Variant("none", "nothing", chunk_context="none"),
)
