"""Settings of the chunk cache: its size, and how documents are split, placed and repaired."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kvmosaic.config.setting import Unset, parse_bytes, setting, validate_settings
from kvmosaic.errors import InvalidConfig, InvalidSeparator
from kvmosaic.eviction import POLICIES, EvictionPolicy, choose
from kvmosaic.layout import ChunkContext
from kvmosaic.layout.strategies import AUTO, describe_strategies, strategy_named, strategy_names
from kvmosaic.prompt.companions import BUNDLED, read_companions
from kvmosaic.prompt.patterns import MAX_PATTERN_CHARACTERS, OwnPattern, read_find_documents
from kvmosaic.prompt.preamble import MAX_RULE_CHARACTERS, preamble_rule
from kvmosaic.prompt.segment import DocumentsOrder
from kvmosaic.prompt.separator import read_separator
from kvmosaic.repair import ASKED_REPAIR, DEFAULT_REPAIR, FORMS, UNMEASURED_REPAIR, RepairPolicy, repair_policy
from kvmosaic.repair.policy import MAX_POLICY_CHARACTERS

_AUTO: Any = Unset("auto")
_COMPANIONS: Any = Unset("companions")
_REPAIR: Any = Unset(DEFAULT_REPAIR)
AUTO_SIZE = "auto"
"""The `chunk_cache_size` that is chosen by the free memory."""


def _check_size(size: Any) -> None:
    if size != AUTO_SIZE:
        parse_bytes(size)


_cache = partial(setting, panel="Chunk cache")


@dataclass(frozen=True, slots=True)
class ChunkCacheConfig:
    """What the chunk cache keeps, how large it may grow, and how documents are placed."""

    chunk_cache_size: int | str = _cache(
        AUTO_SIZE,
        check=_check_size,
        max_length=32,
        metavar="SIZE",
        help="Memory for cached documents, such as 512MiB; auto: a share of what is free once the model is loaded.",
    )
    chunk_cache_fraction: float | None = _cache(
        None,
        above=0,
        below=1,
        help="Instead of `chunk_cache_size`: this fraction of the device's memory, for cached documents only.",
    )
    memory_utilization: float | None = _cache(
        None,
        above=0,
        below=1,
        help="Instead of `chunk_cache_size`: this fraction of the device's memory for weights, `request_cache_size` "
        "and cached documents together; leave some of the rest to compute in.",
    )
    block_size: int = _cache(16, low=1, high=4096, panel="Engine", help="Token slots per block of memory.")
    max_chunks: int = _cache(100_000, low=1, high=10**8, help="Maximum of cached chunks.")
    max_chunk_tokens: int = _cache(32_768, low=1, high=10**7, help="Maximum tokens of a chunk; see `long_chunks`.")
    max_prompt_chunks: int = _cache(4_096, low=1, high=10**6, help="Maximum documents of one prompt.")
    long_chunks: Literal["error", "split", "sections"] = _cache(
        "split",
        flag_alias="--long-documents",
        help="A document that is too long for one chunk: split it, or refuse it (error). sections: divide every "
        "document of more than `max_section_tokens` at headings and blank lines, so that an edit costs one section. "
        "Parts and sections do not see each other.",
    )
    max_section_tokens: int = _cache(
        1_024, low=16, high=10**7, help="Maximum tokens of a section, with `long_chunks` sections."
    )
    oversized_prompts: Literal["ordinary", "error"] = _cache(
        "ordinary",
        help="A prompt whose documents never fit the cache together: answer it as an ordinary prompt, or refuse it.",
    )
    chunk_separator: str | None = _cache(
        None,
        metavar="TEXT",
        unset="prompts are never split",
        help="Text that splits a prompt into documents, such as ##.",
    )
    hash_algorithm: Literal["sha256", "xxh3_128"] = _cache(
        "sha256",
        help="Hash of cache keys; xxh3_128 is faster and always compares tokens. All users of a tier need the same.",
    )
    position_strategy: str = _cache(
        _AUTO,
        choices=partial(strategy_names, auto=True),
        flag_choices=partial(strategy_names, auto=True, offsets=False),
        unset="as the model's profile says, or auto",
        help=f"Documents {describe_strategies(offsets=False)}, or the first where the prompt fits the model's "
        "positions, else the second (auto).",
    )
    chunk_context: ChunkContext = _cache(
        _COMPANIONS,
        unset="the model's profile, or companions for sequential documents, else system",
        help="What a document saw when it was computed: the system text, that and `companions`, or nothing.",
    )
    preamble: str | int = _cache(
        _AUTO,
        check=preamble_rule,
        max_length=MAX_RULE_CHARACTERS,
        metavar="RULE",
        help="How much of the system text documents see: auto (up to the first date, time, long number or address), "
        "all, a number of tokens, before:TEXT or pattern:REGEX.",
    )
    find_documents: str = _cache(
        _AUTO,
        check=read_find_documents,
        max_length=256,
        metavar="NAMES",
        help="Documents in messages: auto (by the templates of well-known applications), agents (what tools returned, "
        "and long pasted blocks), patterns (lists and paragraphs, too; or some by name), stored (stored documents, by "
        "their text), several with commas, or none.",
    )
    document_pattern: str | None = _cache(
        None,
        check=OwnPattern,
        max_length=MAX_PATTERN_CHARACTERS,
        metavar="REGEX",
        help="Your own pattern for `find_documents`, with the groups text and (optional) name.",
    )
    documents_order: DocumentsOrder = _cache(
        "sent",
        help="Order of a prompt's documents: as sent, or any: the one that computes the fewest tokens. Those found in "
        "text keep theirs.",
    )
    companions: str | tuple[str, ...] = _cache(
        BUNDLED,
        check=read_companions,
        max_length=4096,
        metavar="FILE",
        help="Texts that documents see with `chunk_context` companions, which this sets: a file of up to 24 with empty "
        "lines between them, best three documents of each kind; stored: stored documents of the tenant; prose: a "
        "paragraph in their language. A prompt takes three like its documents, or the first three.",
    )
    repair: str | RepairPolicy = _cache(
        _REPAIR,
        check=repair_policy,
        max_length=MAX_POLICY_CHARACTERS,
        metavar="POLICY",
        unset=f"the model's profile, or full where documents are alike, {ASKED_REPAIR} where they met companions "
        f"({UNMEASURED_REPAIR} in llama.cpp), else {DEFAULT_REPAIR}",
        help=f"Tokens of cached documents to compute again: {FORMS}.",
    )
    eviction: str | EvictionPolicy = _cache(
        "lru", check=choose, flag_choices=lambda: tuple(POLICIES), help="Eviction policy of the chunk cache."
    )
    verify_tokens: bool = _cache(True, help="Compare the tokens of a hit with the requested ones.")
    log_stats_seconds: float | None = _cache(
        None, above=0, high=86_400, off="never", help="Seconds between logged statistics of the chunk cache."
    )

    def __post_init__(self) -> None:
        validate_settings(self)
        if self.chunk_cache_fraction is not None and self.memory_utilization is not None:
            raise InvalidConfig(
                f"chunk_cache_fraction={self.chunk_cache_fraction:g} and "
                f"memory_utilization={self.memory_utilization:g} both set the size of the chunk cache; give one of them"
            )
        if self.companions != BUNDLED and not self.says("chunk_context"):
            object.__setattr__(self, "chunk_context", "companions")
        try:
            object.__setattr__(self, "chunk_separator", read_separator(self.chunk_separator))
        except InvalidSeparator as error:
            raise InvalidConfig(str(error)) from None

    def says(self, name: str) -> bool:
        """Whether the caller set `position_strategy`, `chunk_context`, `repair` or `preamble`, even if as the default.

        An unset value may come from the model or its profile.
        """
        return not isinstance(getattr(self, name), Unset)

    def context_in(self, strategy: str | None = None) -> ChunkContext:
        """What documents saw in positions of this strategy (None: the configured one).

        Where nothing is set, documents have met companions only where they are one after the other.
        """
        strategy = strategy or self.position_strategy
        if self.says("chunk_context") or strategy == AUTO:
            return self.chunk_context
        rules = strategy_named(strategy)
        return "system" if rules.overlaps or rules.takes_offsets else self.chunk_context

    def repair_after(self, context: ChunkContext, asked: str) -> str | RepairPolicy:
        """Repair of documents that saw this and are not alike; `asked`, by the question, after companions."""
        return asked if context == "companions" and not self.says("repair") else self.repair

    @property
    def capacity_bytes(self) -> int | None:
        """`chunk_cache_size` in bytes; None: a share of the free memory."""
        return None if self.chunk_cache_size == AUTO_SIZE else parse_bytes(self.chunk_cache_size)
