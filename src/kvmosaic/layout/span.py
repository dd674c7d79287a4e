"""Spans: segments that have a place, and what each of them sees from how far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvmosaic.prompt import Segment, SegmentKind

AutoStrategy = Literal["sequential", "shared"]
FixedStrategy = Literal["shared", "sequential", "absolute"]
PositionStrategy = Literal["auto", "shared", "sequential", "absolute"]
"""`auto` is one of the others, chosen for each prompt; see `choose_strategy`."""
ChunkContext = Literal["system", "lead_in", "none"]
"""What chunks saw when they were computed: the system text, the system text and a lead-in, or nothing."""


@dataclass(frozen=True, slots=True)
class Weight:
    """How the scores of a run of keys count in the softmax: multiplied by `factor`, then increased by `bias`."""

    factor: float = 1.0
    bias: float = 0.0


UNWEIGHTED = Weight()


@dataclass(frozen=True, slots=True)
class View:
    """One earlier span as seen by a later one: all of its tokens, moved by `distance`.

    A key computed at position j is used as if it stood at j + distance. The stored key is never touched; the reader's
    query is turned by -distance instead.
    """

    span: int
    """Index of the span that is seen."""
    distance: int
    hidden: tuple[int, ...] = ()
    """Numbers of its tokens that are not seen, because the reader sees them repaired; ascending."""
    ends: tuple[int, ...] = ()
    """Repaired tokens only: for each of them, how many of the first tokens of that span it sees; empty: all see all."""
    weight: Weight = UNWEIGHTED
    """How scores of its keys count."""

    @property
    def is_plain(self) -> bool:
        """Whether all of its tokens are seen as they are."""
        return not self.hidden and not self.ends and self.weight == UNWEIGHTED


@dataclass(frozen=True, slots=True)
class Span:
    """A segment with a place.

        start               position of the first token when its keys are computed
        views               the earlier spans it sees, each from its own distance; inside itself it is causal

    A question's views put the whole prompt together; a chunk's views are what its cached keys and values depend on.
    """

    segment: Segment
    start: int
    views: tuple[View, ...] = ()
    places: tuple[int, ...] = ()
    """Repaired tokens only: the position of each of them; empty: from `start` on."""
    parts: tuple[int, ...] = ()
    """Repaired tokens only: the number of the first token of each chunk's part."""

    @property
    def is_repair(self) -> bool:
        """Whether these are tokens of other spans, computed again."""
        return self.segment.kind is SegmentKind.REPAIR

    @property
    def is_lead_in(self) -> bool:
        """Whether nothing but chunks sees it, when they are computed."""
        return self.segment.kind is SegmentKind.LEAD_IN

    @property
    def num_tokens(self) -> int:
        """Tokens in this span."""
        return self.segment.num_tokens

    @property
    def end(self) -> int:
        """One past the position of the last token, as computed."""
        return max(self.places) + 1 if self.places else self.start + self.num_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens in this span."""
        assert self.segment.token_ids is not None
        return self.segment.token_ids


@dataclass(frozen=True, slots=True)
class Layout:
    """All spans of one prompt, in prompt order; a span sees only spans before it.

    The last span is the one that goes on growing with the answer.
    """

    spans: tuple[Span, ...]
    strategy: FixedStrategy = "shared"
    chunk_context: ChunkContext = "system"
    fresh_tokens: int = 0
    """So many last tokens of the last span are computed even if they are cached: their attention, or their logits, are
    wanted."""

    @property
    def last(self) -> Span:
        """The question (or the plain prompt): the span that the answer extends."""
        return self.spans[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(span.num_tokens for span in self.spans if not span.is_repair and not span.is_lead_in)

    @property
    def repair(self) -> int | None:
        """Index of the span of repaired tokens, if there is one."""
        return next((index for index, span in enumerate(self.spans) if span.is_repair), None)

    @property
    def is_moved(self) -> bool:
        """Whether any key is used at another position than the one it was computed at."""
        return any(view.distance for span in self.spans for view in span.views)

    def positions(self) -> dict[int, int]:
        """By index of a span that the last one sees: the position of its first token as the last span sees it."""
        return {view.span: self.spans[view.span].start + view.distance for view in self.last.views}

    def position_of(self, span_index: int) -> int:
        """Position of a span's first token as the last span sees it."""
        if span_index == len(self.spans) - 1:
            return self.last.start
        for view in self.last.views:
            if view.span == span_index:
                return self.spans[span_index].start + view.distance
        raise IndexError(f"span {span_index} is not seen by the last span")
