"""Spans: segments that have a place, and what each of them sees from how far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvmosaic.prompt import Segment

PositionStrategy = Literal["shared", "sequential", "absolute"]
ChunkContext = Literal["system", "none"]


@dataclass(frozen=True, slots=True)
class View:
    """One earlier span as seen by a later one: all of its tokens, moved by `distance`.

    A key computed at position j is used as if it stood at j + distance. The stored key is never touched; the reader's
    query is turned by -distance instead.
    """

    span: int
    """Index of the span that is seen."""
    distance: int


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

    @property
    def num_tokens(self) -> int:
        """Tokens in this span."""
        return self.segment.num_tokens

    @property
    def end(self) -> int:
        """One past the position of the last token, as computed."""
        return self.start + self.num_tokens

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
    strategy: PositionStrategy = "shared"
    chunk_context: ChunkContext = "system"

    @property
    def last(self) -> Span:
        """The question (or the plain prompt): the span that the answer extends."""
        return self.spans[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(span.num_tokens for span in self.spans)

    @property
    def is_moved(self) -> bool:
        """Whether any key is used at another position than the one it was computed at."""
        return any(view.distance for span in self.spans for view in span.views)

    def position_of(self, span_index: int) -> int:
        """Position of a span's first token as the last span sees it."""
        if span_index == len(self.spans) - 1:
            return self.last.start
        for view in self.last.views:
            if view.span == span_index:
                return self.spans[span_index].start + view.distance
        raise IndexError(f"span {span_index} is not seen by the last span")
