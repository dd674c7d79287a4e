"""A plan: for every span of a prompt, what is reused and what must be computed. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvmosaic.cache.block_pool import BlockId
from kvmosaic.cache.keys import Key
from kvmosaic.layout import Layout
from kvmosaic.prompt import SegmentKind

Action = Literal["reuse", "compute", "wait"]


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """The plan of one span.

    action:
        reuse      every token is cached
        compute    at least one token is computed; those before it may be reused (`num_reused`)
        wait       a chunk already being computed, by another request or by an earlier span of this one
    """

    index: int
    kind: SegmentKind
    name: str | None
    action: Action
    num_tokens: int
    num_reused: int
    """Tokens that this span does not compute."""
    distance: int
    """How far its keys are moved for the last span; 0 for the last span itself and for spans it does not see."""
    block_ids: tuple[BlockId, ...]
    """Reused blocks, in the pool of its kind."""
    key: Key = field(repr=False)
    """Chunks: the lookup key. Other closed spans: the run key. The span that grows: its root."""
    identity: Key = field(repr=False)
    """The run key of chunks and other closed spans, as used in keys of later spans."""
    root: Key = field(repr=False)
    """Key of what it sees and where it starts."""
    block_keys: tuple[Key, ...] = field(repr=False)
    """Chained keys of the reused prefix blocks."""
    tokens: bytes = field(repr=False)
    """Its token ids, encoded."""
    num_copied: int = 0
    """Of the reused tokens, those at the end that are copied from a block which diverges after them."""

    @property
    def is_chunk(self) -> bool:
        """Whether it lives in the chunk pool."""
        return self.kind is SegmentKind.CHUNK

    @property
    def is_left_out(self) -> bool:
        """Whether it is a lead-in that no chunk needs now, so that it takes no blocks."""
        return self.kind is SegmentKind.LEAD_IN and not self.num_tokens

    @property
    def num_to_compute(self) -> int:
        """Tokens that this span computes."""
        return self.num_tokens - self.num_reused


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of one prompt, as of the moment of planning; `KVCache.allocate` carries it out."""

    layout: Layout
    salt: str
    spans: tuple[SpanPlan, ...]
    tenant: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(span.num_tokens for span in self.spans)

    @property
    def reused_tokens(self) -> int:
        """Tokens that this prompt does not compute."""
        return sum(span.num_reused for span in self.spans)

    @property
    def computed_tokens(self) -> int:
        """Tokens that this prompt computes."""
        return sum(span.num_to_compute for span in self.spans)

    def __str__(self) -> str:
        """A small table, one line per span."""
        rows = [("span", "kind", "name", "tokens", "reused", "moved by", "action")]
        rows += [
            (
                str(span.index),
                str(span.kind),
                span.name or "-",
                str(span.num_tokens),
                str(span.num_reused),
                f"{span.distance:+d}" if span.distance else "0",
                span.action,
            )
            for span in self.spans
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        is_number = (True, False, False, True, True, True, False)
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, is_number, strict=True)
            ).rstrip()
            for row in rows
        ]
        lines.append(f"{self.num_tokens} tokens: {self.reused_tokens} reused, {self.computed_tokens} computed")
        return "\n".join(lines)
