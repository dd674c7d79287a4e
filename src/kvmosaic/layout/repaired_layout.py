"""Repaired layouts: the request recomputes some tokens of chunks, and reads them instead of the cached ones.

    before     system | chunk 1 | chunk 2 |                    question
    after      system | chunk 1 | chunk 2 | repaired tokens  | question
                                  . x . x    x x               sees chunk 2 without its x, and the repaired tokens

A repaired token is positioned after everything before it in the prompt (see `repair_positions`), and sees it, in prompt
order: whole earlier spans, the earlier tokens of its own chunk, and of all of them repaired instead of cached tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvmosaic.layout.span import Layout, Span, View, Visibility
from kvmosaic.prompt import Segment, SegmentKind


def exact_spans(layout: Layout) -> set[int]:
    """Indexes of the spans that saw everything before them in the prompt, from where the question sees it.

    Recomputing these would give the same keys and values.
    """
    exact: set[int] = set()
    earlier: dict[int, int] = {}
    for index, position in layout.positions().items():  # in prompt order
        span = layout.spans[index]
        shift = position - span.start
        seen = {view.span: layout.spans[view.span].start + view.distance + shift for view in span.views}
        if seen != earlier:
            break  # nor can any later span have seen everything as it is
        exact.add(index)
        earlier[index] = position
    return exact


def repair_positions(layout: Layout) -> dict[int, int]:
    """By index of a span before the last: the position of its first token for repaired tokens.

    That is where the question sees it. In `shared` positions documents overlap there, and a token that sees others
    needs to know their order: for repaired tokens, and for them only, documents and texts are one after the other.
    """
    positions = layout.positions()
    if layout.rules.overlaps:
        cursor = None
        for index in positions:
            if layout.spans[index].is_chunk or (cursor is not None and layout.spans[index].is_text):
                positions[index] = positions[index] if cursor is None else cursor
                cursor = positions[index] + layout.spans[index].num_tokens
    return positions


def repaired(layout: Layout, chosen: Mapping[int, Sequence[int]]) -> Layout:
    """The layout in which the question reads some tokens of chunks recomputed with everything before them visible.

    Args:
        layout: as arranged, without repaired tokens.
        chosen: by index of a chunk's span, the indexes of its repaired tokens, ascending.
    """
    assert layout.repair is None, "a layout is repaired once"
    hidden = {index: tuple(tokens) for index, tokens in chosen.items() if tokens}
    question = layout.last
    if not hidden:
        return layout
    views = [replace(view, visibility=_visibility(hidden.get(view.span, ()))) for view in question.views]
    from_repair = repair_positions(layout)
    span = _repair_span(layout, hidden, from_repair)
    views += _views_of_parts(layout, span, sorted(hidden), from_repair)
    spans = (*layout.spans[:-1], span, replace(question, views=tuple(views)))
    return replace(layout, spans=spans)


def later_tokens_seen(layout: Layout) -> str:
    """Which repaired token sees tokens at later positions than its own, in words; empty if none does.

    That is so where documents overlap at their own offsets. A mask that goes by positions may hide it.
    """
    if layout.repair is None:
        return ""
    repair = layout.spans[layout.repair]
    for row in repair.parts:  # the first token of each part has the lowest position
        for view in repair.views:
            span, ends = layout.spans[view.span], view.visibility.ends if view.visibility is not None else ()
            last = span.start + view.distance + (ends[row] if ends else span.num_tokens) - 1
            if last >= repair.positions[row] and (not ends or ends[row]):
                return (
                    f"{span.segment.label} ends at position {last:,}, and a repaired token that sees it is at position "
                    f"{repair.positions[row]:,}"
                )
    return ""


def _views_of_parts(layout: Layout, span: Span, chunks: Sequence[int], from_repair: Mapping[int, int]) -> list[View]:
    """The question's views of repaired tokens: each chunk's part where it sees the chunk."""
    positions, number = layout.positions(), len(layout.spans) - 1
    ends = (*span.parts[1:], span.num_tokens)
    rows: dict[int, list[int]] = {}
    for index, first, last in zip(chunks, span.parts, ends, strict=True):
        rows.setdefault(positions[index] - from_repair[index], []).extend(range(first, last))
    everything = range(span.num_tokens)
    return [
        View(number, distance, _visibility(tuple(row for row in everything if row not in seen)))
        for distance, seen in ((distance, set(part)) for distance, part in rows.items())
    ]


def _visibility(hidden: tuple[int, ...], ends: tuple[int, ...] = ()) -> Visibility | None:
    return Visibility(hidden, ends) if hidden or ends else None


def _repair_span(layout: Layout, hidden: Mapping[int, tuple[int, ...]], from_repair: Mapping[int, int]) -> Span:
    rows = [(index, token) for index in sorted(hidden) for token in hidden[index]]
    views = []
    for view in layout.last.views:
        length = layout.spans[view.span].num_tokens
        ends = tuple(length if view.span < index else token if view.span == index else 0 for index, token in rows)
        if any(ends):
            is_whole = all(end == length for end in ends)
            distance = from_repair[view.span] - layout.spans[view.span].start
            visibility = _visibility(hidden.get(view.span, ()), ends=() if is_whole else ends)
            views.append(View(view.span, distance, visibility))
    positions = tuple(from_repair[index] + token for index, token in rows)
    token_ids = tuple(layout.spans[index].token_ids[token] for index, token in rows)
    parts = tuple(number for number, row in enumerate(rows) if number == 0 or row[0] != rows[number - 1][0])
    return Span(Segment(SegmentKind.REPAIR, token_ids), positions[0], tuple(views), positions, parts)
