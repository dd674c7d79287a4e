"""Spans: segments with a position, and what each of them sees at which distance; the same as one dense mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvmosaic.layout.strategies import STRATEGIES, PositionStrategy
from kvmosaic.prompt import Segment, SegmentKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


ChunkContext = Literal["system", "companions", "none"]
"""What chunks see when they are computed: the system text, the system text and companions, or nothing."""
CHUNK_CONTEXT_KEY = "kvmosaic_chunk_context"
"""In a model's config.json: "system", where its documents are not to meet companions by default."""


def context_with(companions: object | None, chunk_context: ChunkContext | None) -> ChunkContext | None:
    """The context that is wished for; who names companions wants documents to see them."""
    return "companions" if chunk_context is None and companions is not None else chunk_context


@dataclass(frozen=True, slots=True)
class Visibility:
    """How a run of keys is seen, where a repair does not show all of it as it is."""

    hidden: tuple[int, ...] = ()
    """Indexes of keys that no reader sees, because it sees them repaired; ascending."""
    ends: tuple[int, ...] = ()
    """For each reading token, how many of the first keys it sees; empty: all see all."""


@dataclass(frozen=True, slots=True)
class View:
    """One earlier span as seen by a later one: all of its tokens, moved by `distance`.

    A key computed at position j is used as if at position j + distance. The stored key is never changed; the reader's
    query is rotated by -distance instead.
    """

    span: int
    """Index of the visible span."""
    distance: int
    visibility: Visibility | None = None
    """What a repair hides of it; None: all of its tokens are seen unchanged."""


@dataclass(frozen=True, slots=True)
class Span:
    """A segment with a position.

        start               position of the first token when its keys are computed
        views               the earlier spans it sees, each at its own distance; within the span, attention is causal

    A question's views assemble the whole prompt; a chunk's cached keys and values depend on its views.
    """

    segment: Segment
    start: int
    views: tuple[View, ...] = ()
    positions: tuple[int, ...] = ()
    """Repaired tokens only: the position of each of them; empty: from `start` on."""
    parts: tuple[int, ...] = ()
    """Repaired tokens only: the index of the first token of each chunk's part."""

    @property
    def is_chunk(self) -> bool:
        """Whether it is a document, or a part of one, with keys and values of its own."""
        return self.segment.kind is SegmentKind.CHUNK

    @property
    def is_repair(self) -> bool:
        """Whether its tokens are recomputed tokens of other spans."""
        return self.segment.kind is SegmentKind.REPAIR

    @property
    def is_companion(self) -> bool:
        """Whether only chunks see it, when they are computed."""
        return self.segment.kind is SegmentKind.COMPANION

    @property
    def is_text(self) -> bool:
        """Whether it is a text between documents or after the preamble, which sees everything before it."""
        return self.segment.kind is SegmentKind.TEXT

    @property
    def num_tokens(self) -> int:
        """Tokens in this span."""
        return self.segment.num_tokens

    @property
    def num_in_prompt(self) -> int:
        """Its tokens in the prompt, which has none of a companion."""
        return 0 if self.is_companion else self.num_tokens

    @property
    def end(self) -> int:
        """One past the position of the last token, as computed."""
        return max(self.positions) + 1 if self.positions else self.start + self.num_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens in this span."""
        assert self.segment.token_ids is not None
        return self.segment.token_ids


@dataclass(frozen=True, slots=True)
class LayoutAdapter:
    """The low-rank adapter that computes a layout's tokens.

    digest: identifies its content; empty: the base model
    key_digest: the same, for cache keys; empty also where keys and values provably do not depend on the adapter
    """

    digest: str = ""
    key_digest: str = ""


BASE_MODEL = LayoutAdapter()


@dataclass(frozen=True, slots=True)
class Layout:
    """All spans of one prompt, in prompt order; a span sees only spans before it.

    The last span grows with the answer.
    """

    spans: tuple[Span, ...]
    strategy: str = "shared"
    """Name of the position strategy."""
    chunk_context: ChunkContext = "system"
    fresh_tokens: int = 0
    """Number of last tokens of the last span that are computed even if cached, because their attention or logits are
    needed."""
    adapter: LayoutAdapter = BASE_MODEL
    """What computes it besides the model's own weights."""

    @property
    def rules(self) -> PositionStrategy:
        """The position strategy."""
        return STRATEGIES[self.strategy]

    @property
    def last(self) -> Span:
        """The question (or the plain prompt): the span that the answer extends."""
        return self.spans[-1]

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return sum(span.num_tokens for span in self.spans if not span.is_repair and not span.is_companion)

    @property
    def chunk_token_ids(self) -> list[tuple[int, ...]]:
        """The tokens of each chunk, in prompt order."""
        return [span.token_ids for span in self.spans if span.is_chunk]

    @property
    def companions(self) -> list[tuple[int, ...]]:
        """The tokens of each companion."""
        return [span.token_ids for span in self.spans if span.is_companion]

    @property
    def repair(self) -> int | None:
        """Index of the span of repaired tokens, if there is one."""
        return next((index for index, span in enumerate(self.spans) if span.is_repair), None)

    @property
    def repaired_chunks(self) -> dict[int, int]:
        """By span index, in prompt order, of the chunks with repaired tokens: how many these are."""
        seen = {view.span: len(view.visibility.hidden) for view in self.last.views if view.visibility is not None}
        return {index: count for index, count in seen.items() if count and self.spans[index].is_chunk}

    @property
    def is_moved(self) -> bool:
        """Whether any key is used at another position than the one it was computed at."""
        return any(view.distance for span in self.spans for view in span.views)

    def positions(self) -> dict[int, int]:
        """Position of the first token of each visible span, by span index, as seen by the last span."""
        return {view.span: self.spans[view.span].start + view.distance for view in self.last.views}

    def position_of(self, span_index: int) -> int:
        """Position of a span's first token, as seen by the last span."""
        if span_index == len(self.spans) - 1:
            return self.last.start
        for view in self.last.views:
            if view.span == span_index:
                return self.spans[span_index].start + view.distance
        raise IndexError(f"span {span_index} is not seen by the last span")


@dataclass(frozen=True, slots=True)
class DenseLayout:
    """What every token of a prompt sees, T tokens in prompt order.

    token_ids: [T]
    positions: [T], the position of each token when it is computed
    mask: [T, T], True where the row token sees the column token
    distances: [T, T], how far the column's key is moved for the row; 0 where the mask is False
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    mask: NDArray[np.bool_]
    distances: NDArray[np.int64]

    @property
    def question_positions(self) -> NDArray[np.int64]:
        """[T], the position of each token as seen by the last token."""
        positions: NDArray[np.int64] = self.positions + self.distances[-1]
        return positions

    @property
    def is_one_forward(self) -> bool:
        """Whether one dense forward with `question_positions` and `mask` is equivalent: all distances agree."""
        relative = self.question_positions[None, :] - self.question_positions[:, None]
        computed = self.positions[None, :] + self.distances - self.positions[:, None]
        return bool(((relative == computed) | ~self.mask).all())


SYSTEM, QUESTION = -1, -2
"""Numbers of tokens that are in no chunk, for `chunk_mask`."""


def chunk_mask(chunk_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.bool_]:
    """The mask of tokens of which each says in which chunk it is.

    Args:
        chunk_ids: [T], the number of each token's chunk, 0 and up; -1 in the system text, -2 in the question.

    Returns:
        [T, T], True where the row token sees the column token: itself, and of the tokens before it those of its own
        chunk and of the system text; in the question all.
    """
    import numpy as np

    ids = np.asarray(chunk_ids, dtype=np.int64)
    seen = (ids[:, None] == ids) | (ids == SYSTEM) | (ids == QUESTION)[:, None]
    mask: NDArray[np.bool_] = np.tri(len(ids), dtype=np.bool_) & seen
    return mask


def dense(layout: Layout) -> DenseLayout:
    """Expands a layout to positions, a boolean mask and distances (numpy, no torch).

    Repaired tokens are separate tokens, between chunks and question.
    """
    import numpy as np  # deferred: everything imports layouts, and a command line should start fast

    offsets = np.cumsum([0] + [span.num_tokens for span in layout.spans])
    num_tokens = int(offsets[-1])
    mask = np.zeros((num_tokens, num_tokens), dtype=np.bool_)
    distances = np.zeros((num_tokens, num_tokens), dtype=np.int64)
    positions = np.zeros(num_tokens, dtype=np.int64)
    token_ids = np.zeros(num_tokens, dtype=np.int64)
    for index, span in enumerate(layout.spans):
        rows = slice(offsets[index], offsets[index + 1])
        positions[rows] = span.positions or span.start + np.arange(span.num_tokens)
        token_ids[rows] = span.token_ids
        mask[rows, rows] = np.tri(span.num_tokens, dtype=np.bool_)
        for view in span.views:
            columns = slice(offsets[view.span], offsets[view.span + 1])
            numbers = np.arange(layout.spans[view.span].num_tokens)
            seen = view.visibility or Visibility()
            shown = np.isin(numbers, seen.hidden, invert=True)[None, :]
            if seen.ends:
                shown = shown & (numbers[None, :] < np.array(seen.ends)[:, None])
            mask[rows, columns] |= shown
            distances[rows, columns] = np.where(shown, view.distance, distances[rows, columns])
    return DenseLayout(token_ids, positions, mask, distances)
