"""Variants of a replay, and the figures of one: tokens reused, over all requests so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvmosaic.bench.progress import Watcher
from kvmosaic.bench.trace.trace import Trace, TraceRequest
from kvmosaic.layout import ChunkContext
from kvmosaic.prompt import DocumentsOrder


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to cache the prompts of a trace."""

    name: str
    about: str
    """In tables: what documents see, so that they are found after it only."""
    preamble: Literal["all", "first", "auto"] = "all"
    """What documents see of the system text: all, its first block, or what the rule "auto" finds in its text."""
    chunk_context: ChunkContext = "system"
    documents_order: DocumentsOrder = "sent"
    is_plain: bool = False
    """Whether prompts are ordinary ones, for the prefix cache alone."""


PREFIX_ONLY = Variant("prefix", "prefix caching only", is_plain=True)
FIRST_BLOCK = Variant("first-block", "its first block", "first")
VARIANTS = (
    PREFIX_ONLY,
    Variant("system", "the whole system text"),
    FIRST_BLOCK,
    Variant("auto", "it, up to the first date", "auto"),
    Variant("companions", "it, and a companion", "auto", "companions"),
    Variant("any-order", "the same, in the order that reuses most", "auto", "companions", "any"),
    Variant("none", "nothing", chunk_context="none"),
)


_CURVE_POINTS = 50


@dataclass(slots=True)
class ReplayRow:
    """What one variant saved."""

    variant: str
    about: str
    """What documents see."""
    cache: str
    """Size and eviction policy."""
    num_requests: int = 0
    document_tokens: int = 0
    document_reused: int = 0
    prompt_tokens: int = 0
    prompt_reused: int = 0
    evictions: int = 0
    """Chunks evicted; of a trace without documents, blocks."""
    was_bounded: bool = False
    """Whether blocks were evicted from a cache that should have been unlimited."""
    seconds: float = 0.0
    is_complete: bool = True
    """Off after an interrupt."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """Requests so far, and both shares at that moment."""

    @property
    def document_share(self) -> float:
        """Share of the tokens of documents that were not computed; 0 without documents."""
        return self.document_reused / self.document_tokens if self.document_tokens else 0.0

    @property
    def prompt_share(self) -> float:
        """Share of all prompt tokens that were not computed."""
        return self.prompt_reused / self.prompt_tokens if self.prompt_tokens else 0.0

    def add(self, documents: tuple[int, int], prompt: tuple[int, int]) -> None:
        """Counts one request: tokens, and how many of them were reused."""
        self.num_requests += 1
        self.document_tokens += documents[0]
        self.document_reused += documents[1]
        self.prompt_tokens += prompt[0]
        self.prompt_reused += prompt[1]

    def mark(self, num_requests: int) -> None:
        """Adds a point of the curve, if one is due in a replay of so many requests."""
        if self.num_requests % max(num_requests // _CURVE_POINTS, 1) == 0 or self.num_requests == num_requests:
            self.curve.append((self.num_requests, round(self.document_share, 5), round(self.prompt_share, 5)))

    def to_dict(self) -> dict[str, Any]:
        """Names and values, for JSON; the curve comes last."""
        values = asdict(self) | {"seconds": round(self.seconds, 2)}
        curve = values.pop("curve")
        shares = {"document_share": round(self.document_share, 5), "prompt_share": round(self.prompt_share, 5)}
        return {**values, **shares, "curve": curve}


def replay(row: ReplayRow, trace: Trace, answer: Callable[[TraceRequest], None], watcher: Watcher) -> None:
    """Answers the requests of a trace one after the other; an interrupt ends it, with `is_complete` off.

    Args:
        row: the figures, to which `answer` adds each request.
        trace: the requests.
        answer: answers one of them.
        watcher: called after every request.
    """
    started = time.monotonic()
    try:
        for request in trace.requests:
            answer(request)
            row.mark(len(trace.requests))
            watcher.answered(f"{row.variant}, {row.cache}")
    except KeyboardInterrupt:
        row.is_complete = False
    row.seconds = time.monotonic() - started


def reused_documents(num_reused: int, before: int, documents: int) -> int:
    """Of a reused prefix, the tokens in documents that begin after `before` tokens."""
    return min(max(num_reused - before, 0), documents)
