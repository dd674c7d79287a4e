"""Arrangement of segments: a position and views for each of them, also in words."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import islice, takewhile

from kvmosaic.errors import InvalidConfig, InvalidOffset
from kvmosaic.layout.repaired_layout import exact_spans
from kvmosaic.layout.span import ChunkContext, Layout, Span, View
from kvmosaic.layout.strategies import PositionStrategy, strategy_named
from kvmosaic.prompt import Prompt, Segment, SegmentKind, seen_chunks
from kvmosaic.prompt.companions import NUM_COMPANIONS, alike_companions


def arrange(
    prompt: Prompt,
    strategy: str = "shared",
    chunk_context: ChunkContext = "system",
    *,
    moves_sections: bool = True,
) -> Layout:
    """Assigns a position and views to every segment of a tokenized prompt.

    With n tokens before the first chunk and chunks of m_1, m_2, … tokens:

        shared        every chunk at n (the parts of a split document one after the other); the question at n + max m
        sequential    chunk i at n + m_1 + … + m_(i-1); the question at n + sum m
        absolute      chunk i at its `position_offset`; the question after the last token of all

    A text segment is like the question: right after the last token before it, all of which it sees. So texts between
    chunks push later chunks on in `sequential` positions only.

    A chunk is *computed* at a position that does not depend on the other segments: right after what it sees (the
    system segment, and chunks named in `sees`), or at position 0 when it sees nothing; a later part of a split document
    so much later as the document has tokens before it, unless it is a section. The views of texts and question move it.
    Without `moves_sections`, for a model whose keys cannot be moved, a section is like any other part. With the context
    "companions", texts of `Prompt.companions` are between system segment and chunk when the chunk is computed, and are
    dropped afterwards: as many as there are documents before it in the prompt, or all, so none for the first document.
    With `absolute` positions, where nothing moves, and without companions, it equals the context "system".

    Raises:
        InvalidOffset: an offset that is missing, unexpected or inside the system prompt.
        InvalidSees: a chunk sees itself, a later chunk or a chunk that does not exist.
        InvalidConfig: an unknown strategy or chunk context.
    """
    rules = strategy_named(strategy)
    if chunk_context not in ("system", "companions", "none"):
        raise InvalidConfig(f"chunk_context is {chunk_context!r}; choose 'system', 'companions' or 'none'")
    if prompt.is_plain:
        return Layout((Span(prompt.segments[0], 0),), strategy, chunk_context)
    if chunk_context == "companions" and (rules.takes_offsets or not prompt.companions):
        chunk_context = "system"
    system = prompt.segments[0] if prompt.segments[0].kind is SegmentKind.SYSTEM else None
    spans = [Span(system, 0)] if system else []
    if chunk_context == "companions":
        num_later = sum(not chunk.continues for chunk in prompt.chunks[1:])
        for text in prompt.companions[: prompt.place + num_later]:
            start, views = spans[-1].end if spans else 0, tuple(View(index, 0) for index in range(len(spans)))
            spans.append(Span(Segment(SegmentKind.COMPANION, text), start, views))
    placed = _Placed(rules, spans, start_of_chunks=_before_chunks(prompt), moves_sections=moves_sections)
    seen_by = iter(seen_chunks(prompt.chunks))
    num_before = prompt.place - 1
    for segment in prompt.segments[1 if system else 0 : -1]:
        if segment.kind is SegmentKind.TEXT:
            placed.add_text(segment)
            continue
        num_before += not placed.chunks or not segment.continues
        context = () if chunk_context == "none" else _context(spans[: placed.first], num_before, segment)
        base = spans[context[-1].span].end if context else 0
        views, start = placed.views_of(next(seen_by), base)
        if rules.takes_offsets:
            lowest = max(start, placed.start_of_chunks)
            is_bos = system is not None and system.text == "" and lowest == system.num_tokens
            start = _checked_offset(segment, lowest, strategy, is_bos=is_bos)
        elif segment.position_offset is not None:
            raise InvalidOffset(
                f"{segment.label} has position_offset {segment.position_offset}, but the strategy is {strategy!r}; "
                "use position_strategy='absolute' or leave the offset out"
            )
        elif not placed.moves(segment):
            # its offset in its document: nothing is moved in shared positions, and every prompt hits it
            start += segment.document_offset
        placed.add_chunk(Span(segment, start, context + views), base)
    placed.add_text(prompt.segments[-1])
    return Layout(tuple(spans), strategy, chunk_context)


class _Placed:
    """The spans of a prompt so far, and where its later spans read them."""

    def __init__(
        self, rules: PositionStrategy, spans: list[Span], start_of_chunks: int, *, moves_sections: bool
    ) -> None:
        self.spans = spans
        self.first = len(spans)
        """Number of spans before the first chunk or text: the system segment and the companions."""
        self.start_of_chunks = start_of_chunks
        """Position after the system segment and the texts before the first chunk."""
        self.chunks: list[int] = []
        """Indexes of the chunks' spans."""
        self._rules = rules
        self._moves_sections = moves_sections and not rules.takes_offsets
        self._positions = {index: span.start for index, span in enumerate(spans) if not span.is_companion}
        """Where the prompt reads each span; no companion."""
        self._cursor = sum(spans[index].num_tokens for index in self._positions)
        """End of all spans, if they are one after the other."""
        self._end = self._cursor
        """Position after the last token of all."""

    def add_text(self, segment: Segment) -> None:
        """Adds a text or the question: after the last token of all, which it sees."""
        end = self._end
        views = (View(index, position - self.spans[index].start) for index, position in self._positions.items())
        self._add(Span(segment, end, tuple(views)), end)

    def add_chunk(self, span: Span, base: int) -> None:
        """Adds a chunk that was computed after `base` tokens."""
        self.chunks.append(len(self.spans))
        start = span.start + self._offset(span.segment)
        self._add(span, self._rules.position(start, self._cursor, self.start_of_chunks - base))

    def views_of(self, numbers: tuple[int, ...], base: int) -> tuple[tuple[View, ...], int]:
        """Views of the chunks that a chunk sees, and the first position after all that it sees."""
        views, end = [], base
        for number in numbers:
            seen = self.spans[self.chunks[number]]
            position = self._rules.position_of_seen(seen.start + self._offset(seen.segment), end)
            views.append(View(self.chunks[number], position - seen.start))
            end = max(end, position + seen.num_tokens)
        return tuple(views), end

    def moves(self, segment: Segment) -> bool:
        """Whether a chunk is computed at a position that does not depend on its offset in its document."""
        return self._moves_sections and segment.is_section

    def _offset(self, segment: Segment) -> int:
        """How far a chunk is read after the first position of its document, if it was computed there."""
        return segment.document_offset if self.moves(segment) else 0

    def _add(self, span: Span, position: int) -> None:
        self._positions[len(self.spans)] = position
        self._cursor += span.num_tokens
        self._end = max(self._end, position + span.num_tokens)
        self.spans.append(span)


def _before_chunks(prompt: Prompt) -> int:
    """Tokens of the system segment and of the texts before the first chunk."""
    before = itertools.takewhile(lambda segment: segment.kind is not SegmentKind.CHUNK, prompt.segments[:-1])
    return sum(segment.num_tokens for segment in before)


def _context(spans: list[Span], num_before: int, chunk: Segment) -> tuple[View, ...]:
    """What a chunk sees: the system segment, and a companion for each document before it, never itself."""
    num_system = sum(not span.is_companion for span in spans)
    seen = spans[: num_system + num_before]
    same = (index for index, span in enumerate(seen) if span.is_companion and span.token_ids == chunk.token_ids)
    return tuple(View(index, 0) for index in range(next(same, len(seen))))


def _checked_offset(segment: Segment, lowest: int, strategy: str, *, is_bos: bool) -> int:
    offset = segment.position_offset
    if offset is None:
        if segment.origin:
            raise InvalidOffset(
                f"{segment.label} was found in a text ({segment.origin}), where it has no position_offset, and the "
                f"strategy {strategy!r} needs one; set find_documents='none', or another position_strategy"
            )
        raise InvalidOffset(
            f"{segment.label} has no position_offset; the strategy {strategy!r} needs one of at least {lowest} per "
            "document: give it, or choose another position_strategy"
        )
    if offset < lowest:
        bos = ", or give all segments as token ids, which have no BOS token" if is_bos else ""
        seen = "the BOS token of this model ends" if is_bos else "the tokens it sees end"
        raise InvalidOffset(
            f"{segment.label} has position_offset {offset}, but {seen} at {lowest}; "
            f"use an offset of at least {lowest}{bos}"
        )
    return offset


def composition_of(layout: Layout, max_positions: int | None = None, *, is_auto: bool = False, remark: str = "") -> str:
    """Describes what a layout computes: exact attention, or which approximation was requested.

    Args:
        layout: of a prompt.
        max_positions: positions that the model was trained for, or that are allowed; a longer prompt is named.
        is_auto: whether the length of the prompt decided on the strategy.
        remark: on its documents.
    """
    if not any(span.is_chunk for span in layout.spans):
        return f"exact: {remark}" if remark else "exact"
    apart, exact = "documents do not see each other", exact_spans(layout)
    chunks = [index for index, span in enumerate(layout.spans) if span.is_chunk]
    if any(layout.spans[view.span].is_chunk for index in chunks for view in layout.spans[index].views):
        apart = "documents see only the ones named in sees"
        apart = "documents saw everything before them" if exact.issuperset(chunks) else apart
    if (index := layout.repair) is not None:
        apart += f", but for {layout.spans[index].num_tokens} repaired tokens"
    parts = [apart]
    if any(span.is_companion for span in layout.spans):
        parts.append("documents after the first were computed after companions")
    if remark:
        parts.append(remark)
    if layout.chunk_context == "none":
        parts.append("documents did not see the system prompt")
    elif rest := _unseen_before(layout):
        seen = sum(span.num_tokens for span in layout.spans if span.segment.kind == "system")
        parts.append(f"documents saw {seen} of {seen + rest} tokens before them")
    if max_positions is not None and layout.num_tokens >= max_positions:  # and one more for the answer
        reason = ", so auto lets documents overlap" if is_auto and layout.rules.overlaps else ""
        parts.append(
            f"the prompt's {layout.num_tokens:,} tokens do not fit the model's {max_positions:,} positions{reason}"
        )
    return f"composed ({layout.strategy}): " + ", ".join(parts)


def _unseen_before(layout: Layout) -> int:
    """Tokens of texts between the preamble and the first document."""
    before = takewhile(lambda span: span.segment.kind != "chunk", layout.spans)
    return sum(span.num_tokens for span in before if span.is_text)


SHORT_IN_FULL = "documents are short, so they are read in full; repair 'none' reuses them"
LATER_IN_FULL = "documents that are like one before them are read in full"
MIXED_UP = "documents are alike, and may be mixed up"
IN_FULL = (
    "documents are alike, so they are read in full; companions of their kind, or repair 'alike', let them be reused"
)


def with_kin(prompt: Prompt) -> Prompt:
    """A prompt with the few of its companions that are like its documents, or with the first few."""
    if len(prompt.companions) <= 1 or not prompt.chunks:
        return prompt
    kin = alike_companions([chunk.token_ids or () for chunk in prompt.chunks], prompt.companions)
    return replace(prompt, companions=tuple(islice(kin, NUM_COMPANIONS)) or prompt.companions[:NUM_COMPANIONS])
