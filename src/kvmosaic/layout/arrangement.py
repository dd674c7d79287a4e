"""Arrangement of segments: a position and views for each of them."""

from __future__ import annotations

from kvmosaic.errors import InvalidConfig, InvalidOffset
from kvmosaic.layout.span import ChunkContext, Layout, Span, View
from kvmosaic.layout.strategies import PositionStrategy, strategy_named
from kvmosaic.prompt import Prompt, Segment, SegmentKind, seen_chunks


def arrange(prompt: Prompt, strategy: str = "shared", chunk_context: ChunkContext = "system") -> Layout:
    """Assigns a position and views to every segment of a tokenized prompt.

    With n system tokens and chunks of m_1, m_2, … tokens:

        shared        every chunk at n (the parts of a split document one after the other); the question at n + max m
        sequential    chunk i at n + m_1 + … + m_(i-1); the question at n + sum m
        absolute      chunk i at its `position_offset`; the question after the last token of all

    A chunk is *computed* at a position that does not depend on the other chunks: right after what it sees (the system
    prompt, and chunks named in `sees`), or at position 0 when it sees nothing; a later part of a split document so much
    later as the document has tokens before it. The question's views move it. With the context "lead_in" the prompt's
    lead-in is between system prompt and chunk when the chunk is computed, and is dropped afterwards. The first chunk of
    a prompt has none: in the prompt, too, only the system prompt is before it. With `absolute` positions, where nothing
    moves, and without a lead-in, "lead_in" equals the context "system".

    Raises:
        InvalidOffset: an offset that is missing, unexpected or inside the system prompt.
        InvalidSees: a chunk sees itself, a later chunk or a chunk that does not exist.
        InvalidConfig: an unknown strategy or chunk context.
    """
    rules = strategy_named(strategy)
    if chunk_context not in ("system", "lead_in", "none"):
        raise InvalidConfig(f"chunk_context is {chunk_context!r}; choose 'system', 'lead_in' or 'none'")
    if prompt.is_plain:
        return Layout((Span(prompt.segments[0], 0),), strategy, chunk_context)
    if chunk_context == "lead_in" and (rules.takes_offsets or not prompt.lead_in):
        chunk_context = "system"
    system = prompt.segments[0] if prompt.segments[0].kind is SegmentKind.SYSTEM else None
    spans = [Span(system, 0)] if system else []
    system_end = system.num_tokens if system else 0
    if chunk_context == "lead_in" and len(prompt.chunks) > 1:
        spans.append(Span(Segment(SegmentKind.LEAD_IN, prompt.lead_in), system_end, tuple(View(0, 0) for _ in spans)))
    first_chunk = len(spans)
    bases: list[int] = []
    is_first = True
    for segment, seen in zip(prompt.chunks, seen_chunks(prompt.chunks), strict=True):
        is_first = not bases or (is_first and segment.continues)
        context = () if chunk_context == "none" else _context(spans[:first_chunk], is_first=is_first)
        bases.append(spans[context[-1].span].end if context else 0)
        views, start = _views_of(seen, spans, first_chunk, bases[-1], rules)
        if rules.takes_offsets:
            start = _checked_offset(segment, max(start, system_end), strategy)
        elif segment.position_offset is not None:
            raise InvalidOffset(
                f"{segment.label} has position_offset {segment.position_offset}, but the strategy is {strategy!r}; "
                "use position_strategy='absolute' or leave the offset out"
            )
        else:
            # its offset in its document: nothing is moved in shared positions, and every prompt hits it
            start += segment.document_offset
        spans.append(Span(segment, start, context + views))
    positions = _prompt_positions(spans, first_chunk, [system_end - base for base in bases], rules)
    placed = [
        (index, position, span)
        for index, (position, span) in enumerate(zip(positions, spans, strict=True))
        if not span.is_lead_in
    ]
    views = tuple(View(index, position - span.start) for index, position, span in placed)
    question_start = max((position + span.num_tokens for _, position, span in placed), default=0)
    spans.append(Span(prompt.segments[-1], question_start, views))
    return Layout(tuple(spans), strategy, chunk_context)


def _context(spans: list[Span], *, is_first: bool) -> tuple[View, ...]:
    """What every chunk sees: the system prompt, and the lead-in unless the chunk is the first document of its prompt.

    Before the first document there is only the system prompt in the prompt, too: so it is exact.
    """
    return tuple(View(index, 0) for index, span in enumerate(spans) if not (is_first and span.is_lead_in))


def _views_of(
    numbers: tuple[int, ...], spans: list[Span], first_chunk: int, base: int, rules: PositionStrategy
) -> tuple[tuple[View, ...], int]:
    """Views of the chunks that a chunk sees, and the first position after all that it sees."""
    views, end = [], base
    for number in numbers:
        seen = spans[first_chunk + number]
        position = rules.position_of_seen(seen.start, end)
        views.append(View(first_chunk + number, position - seen.start))
        end = max(end, position + seen.num_tokens)
    return tuple(views), end


def _prompt_positions(spans: list[Span], first_chunk: int, shifts: list[int], rules: PositionStrategy) -> list[int]:
    """Positions at which the question sees the first token of each span; `shifts` move chunks to the system's end."""
    positions = [span.start for span in spans[:first_chunk]]
    cursor = sum(span.num_tokens for span in spans[:first_chunk] if not span.is_lead_in)
    for span, shift in zip(spans[first_chunk:], shifts, strict=True):
        positions.append(rules.position(span.start, cursor, shift))
        cursor += span.num_tokens
    return positions


def _checked_offset(segment: Segment, lowest: int, strategy: str) -> int:
    offset = segment.position_offset
    if offset is None:
        raise InvalidOffset(
            f"{segment.label} has no position_offset; the strategy {strategy!r} needs one of at least {lowest} per "
            "chunk, which Segment and chunks.create take"
        )
    if offset < lowest:
        raise InvalidOffset(
            f"{segment.label} has position_offset {offset}, but the tokens it sees end at {lowest}; "
            f"use an offset of at least {lowest}"
        )
    return offset
