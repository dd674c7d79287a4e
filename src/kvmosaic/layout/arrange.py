"""Placing segments: the three position strategies, and which of them suits a prompt."""

from __future__ import annotations

from kvmosaic.errors import InvalidConfig, InvalidOffset
from kvmosaic.layout.span import AutoStrategy, ChunkContext, FixedStrategy, Layout, Span, View
from kvmosaic.prompt import Prompt, Segment, SegmentKind, seen_chunks


def choose_strategy(num_positions: int, max_positions: int | None, *, is_movable: bool = True) -> AutoStrategy:
    """The strategy that `auto` stands for: `sequential` where the prompt fits, otherwise `shared`.

    An ordinary model has learned that documents stand one behind the other; where they overlap it mixes them up. The
    choice depends on the prompt and the model alone, so that cached and computed prompts stay the same.

    Args:
        num_positions: what the prompt and the first token of its answer take in sequential positions.
        max_positions: positions that the model was trained for, or that are allowed; None: no limit.
        is_movable: whether the model's keys may be used at another position.
    """
    is_fitting = max_positions is None or num_positions <= max_positions
    return "sequential" if is_movable and is_fitting else "shared"


def arrange(prompt: Prompt, strategy: FixedStrategy = "shared", chunk_context: ChunkContext = "system") -> Layout:
    """Gives every segment of a tokenized prompt its place and its views.

    With n system tokens and chunks of m_1, m_2, … tokens:

        shared        every chunk at n (the parts of a split document one behind the other); the question at n + max m
        sequential    chunk i at n + m_1 + … + m_(i-1); the question at n + sum m
        absolute      chunk i at its `position_offset`; the question after the last token of all

    A chunk is *computed* in a place that does not depend on the other chunks: right after what it sees (the system
    prompt, and chunks named in `sees`), or from position 0 when it sees nothing; a later part of a split document so
    much further on as it stands in the document. The question's views move it. With the context "lead_in" the prompt's
    lead-in stands between system prompt and chunk when it is computed, and is gone afterwards. The first chunk of a
    prompt has none: only the system prompt stands before it in the prompt as well. With `absolute` positions, where
    nothing moves, and without a lead-in it is the context "system".

    Raises:
        InvalidOffset: an offset that is missing, unexpected or inside the system prompt.
        InvalidSees: a chunk sees itself, a later chunk or a chunk that does not exist.
        InvalidConfig: an unknown strategy or chunk context.
    """
    if strategy not in ("shared", "sequential", "absolute"):
        raise InvalidConfig(f"position_strategy is {strategy!r}; choose 'shared', 'sequential' or 'absolute'")
    if chunk_context not in ("system", "lead_in", "none"):
        raise InvalidConfig(f"chunk_context is {chunk_context!r}; choose 'system', 'lead_in' or 'none'")
    if prompt.is_plain:
        return Layout((Span(prompt.segments[0], 0),), strategy, chunk_context)
    if chunk_context == "lead_in" and (strategy == "absolute" or not prompt.lead_in):
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
        views, start = _views_of(seen, spans, first_chunk, bases[-1], strategy)
        if strategy == "absolute":
            start = _checked_offset(segment, max(start, system_end))
        elif segment.position_offset is not None:
            raise InvalidOffset(
                f"{segment.label} has position_offset {segment.position_offset}, but the strategy is {strategy!r}; "
                "use position_strategy='absolute' or leave the offset out"
            )
        else:
            # where it stands in its document: nothing is moved in shared positions, and every prompt finds it
            start += segment.document_offset
        spans.append(Span(segment, start, context + views))
    positions = _prompt_positions(spans, first_chunk, [system_end - base for base in bases], strategy)
    places = [
        (index, place, span)
        for index, (place, span) in enumerate(zip(positions, spans, strict=True))
        if not span.is_lead_in
    ]
    views = tuple(View(index, place - span.start) for index, place, span in places)
    question_start = max((place + span.num_tokens for _, place, span in places), default=0)
    spans.append(Span(prompt.segments[-1], question_start, views))
    return Layout(tuple(spans), strategy, chunk_context)


def _context(spans: list[Span], *, is_first: bool) -> tuple[View, ...]:
    """What every chunk sees: the system prompt, and the lead-in unless the chunk is the first document of its prompt.

    Nothing but the system prompt stands before that one in the prompt, too: so it is exact.
    """
    return tuple(View(index, 0) for index, span in enumerate(spans) if not (is_first and span.is_lead_in))


def _views_of(
    numbers: tuple[int, ...], spans: list[Span], first_chunk: int, base: int, strategy: FixedStrategy
) -> tuple[tuple[View, ...], int]:
    """Views of the chunks that a chunk sees, and the first position after all that it sees."""
    views, end = [], base
    for number in numbers:
        seen = spans[first_chunk + number]
        place = end if strategy == "sequential" else seen.start
        views.append(View(first_chunk + number, place - seen.start))
        end = max(end, place + seen.num_tokens)
    return tuple(views), end


def _prompt_positions(spans: list[Span], first_chunk: int, shifts: list[int], strategy: FixedStrategy) -> list[int]:
    """Where the question sees the first token of each span; `shifts` take chunks to the end of the system prompt."""
    positions = [span.start for span in spans[:first_chunk]]
    cursor = sum(span.num_tokens for span in spans[:first_chunk] if not span.is_lead_in)
    for span, shift in zip(spans[first_chunk:], shifts, strict=True):
        if strategy == "sequential":
            positions.append(cursor)
            cursor += span.num_tokens
        else:
            positions.append(span.start + (shift if strategy == "shared" else 0))
    return positions


def _checked_offset(segment: Segment, lowest: int) -> int:
    offset = segment.position_offset
    if offset is None:
        raise InvalidOffset(
            f"{segment.label} has no position_offset; the strategy 'absolute' needs one of at least {lowest} per "
            "chunk, which Segment and chunks.create take"
        )
    if offset < lowest:
        raise InvalidOffset(
            f"{segment.label} has position_offset {offset}, but the tokens it sees end at {lowest}; "
            f"use an offset of at least {lowest}"
        )
    return offset
