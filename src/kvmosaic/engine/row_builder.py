"""Row builder: the rows of a step for a sequence, with the stored keys that they read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from kvmosaic.attention import AttentionObserver, Piece, PoolName, RowRules, RowStates, SpanRows
from kvmosaic.cache import BlockTable
from kvmosaic.cache.block_table import SavedState, StateProgress
from kvmosaic.engine.request_repair import QuestionObserver
from kvmosaic.engine.rolling_window import WindowCounters
from kvmosaic.engine.sequence import Sequence, SpanReads
from kvmosaic.engine.step import ScheduledTokens
from kvmosaic.layout import Span, View, Visibility
from kvmosaic.prompt import SegmentKind

_MAX_STRETCHES = 8
"""Most stretches of keys between hidden ones that are read one by one; more are read at once, with a mask."""


def rows_of(work: ScheduledTokens) -> list[SpanRows]:
    """Rows of consecutive tokens of a span.

    Repaired tokens of each chunk get separate rows, so that none of them reads chunks that it does not see.
    """
    first, last = work.first, work.first + work.num_tokens
    parts = work.sequence.request.layout.spans[work.span].parts
    cuts = [first, *(number for number in parts if first < number < last), last]
    rows = [_rows(work.sequence, work.span, start, stop - start, work.num_logits) for start, stop in pairwise(cuts)]
    if work.states is None:
        return rows
    before, following = work.states.before, []
    for (start, stop), each in zip(pairwise(cuts), rows, strict=True):
        ends = ((first + count, state) for count, state in work.states.saves)
        saves = tuple((end - start, state) for end, state in ends if start < end <= stop)
        if start in parts:  # repaired tokens follow what is before their chunk
            states = RowStates(StateProgress(None, saves), _states_seen(work, before, parts.index(start)))
        else:
            is_whole = before is not None and not before.has_map
            states = RowStates(StateProgress(before, saves), () if is_whole else _states_seen(work, before))
        following.append(replace(each, state=states))
        before = saves[-1][1]
    return following


def _states_seen(work: ScheduledTokens, before: SavedState | None, part: int | None = None) -> tuple[SavedState, ...]:
    """The states that tokens follow, in prompt order; for a `part` of repaired tokens, `before` is the last part's."""
    allocation, layout, index = work.sequence.allocation, work.sequence.request.layout, work.span
    assert allocation is not None
    repaired = layout.repaired_chunks if layout.repair is not None and index >= layout.repair else {}
    views = layout.spans[index].views
    if part is not None:
        index, views = list(repaired)[part], layout.last.views
    elif repaired and layout.repair is not None:
        before = allocation.spans[layout.repair].state
    numbers = [view.span for view in views if view.span < index and view.span != layout.repair]
    states: list[SavedState | None] = []
    for place, number in enumerate(numbers):
        chunk = allocation.spans[number].chunk
        if chunk is None:  # its state replaces all that is before it
            assert [view.span for view in layout.spans[number].views] == numbers[:place], "a text sees all before it"
            states = [allocation.spans[number].state]
        elif number not in repaired:
            states.append(chunk.saved_state)
        else:  # the state after its repaired tokens has seen all before it
            kept = chunk.saved_state if repaired[number] < chunk.num_tokens else None
            states = [before, kept.rest if kept is not None else None]
    return tuple(state for state in states if state is not None)


def pool_of(span: Span) -> PoolName:
    """The pool that holds a span's tokens."""
    return "chunk_cache" if span.is_chunk else "request"


def run_reads(span: Span, table: BlockTable, distance: int, num_tokens: int) -> tuple[Piece, ...]:
    """Reads of the first `num_tokens` tokens of a span, moved by `distance`."""
    return tuple(_between(span, table, distance, 0, num_tokens))


def view_reads(
    span: Span, table: BlockTable, view: View, first_row: int = 0, num_rows: int | None = None
) -> tuple[Piece, ...]:
    """Reads of a span through a view: without hidden tokens, and each row as far as it sees.

    Args:
        span: the span that is read.
        table: its block table.
        view: what is visible of it.
        first_row: number of the first reading token, in its own span.
        num_rows: number of reading tokens; None: the view shows all of them the same.
    """
    seen = view.visibility
    if seen is None:
        return run_reads(span, table, view.distance, span.num_tokens)
    ends = seen.ends[first_row : first_row + num_rows] if seen.ends and num_rows is not None else ()
    if ends and min(ends) == max(ends):
        kept, ends = ends[0], ()
    else:
        kept = max(ends, default=span.num_tokens)
    stretches = list(_stretches(seen.hidden, kept))
    if ends or len(stretches) > _MAX_STRETCHES:
        return tuple(_masked(run_reads(span, table, view.distance, kept), replace(seen, ends=ends)))
    return tuple(read for first, last in stretches for read in _between(span, table, view.distance, first, last))


def _rows(sequence: Sequence, span_index: int, first: int, num_tokens: int, num_logits: int) -> SpanRows:
    assert sequence.allocation is not None
    span, allocated = sequence.request.layout.spans[span_index], sequence.allocation.spans[span_index]
    counters = sequence.counters
    token, reads_itself = first + allocated.num_left, num_tokens == 1
    place, limit = token, 0
    if counters is not None and span is sequence.request.layout.last and token >= counters.window.num_positions:
        place, limit = counters.window.position_of(token), counters.window.window_tokens
        reads = (
            *_kept_reads(sequence, counters, token),
            *_window_reads(sequence, counters, token, reads_itself=reads_itself),
        )
    else:
        repairs = span.is_repair
        seen = _seen_by_rows(sequence, span, first, num_tokens) if repairs else _seen(sequence, span_index).pieces
        reads = (*seen, *run_reads(span, allocated.table, 0, first + reads_itself))
    positions = span.positions[first : first + num_tokens]
    return SpanRows(
        token_ids=sequence.tokens_of(span, token, num_tokens),
        position=positions[0] if positions else span.start + place,
        pool=pool_of(span),
        slots=allocated.table.slots(first, num_tokens),
        reads=reads,
        reads_itself=reads_itself,
        num_logits=num_logits,
        # a single row reads what it sees, and nothing else: it needs no window
        rules=RowRules(0 if reads_itself else limit, positions, _observer(sequence, span_index)),
        adapter=sequence.request.layout.adapter.digest,
    )


def _observer(sequence: Sequence, span_index: int) -> AttentionObserver | None:
    """Observer of a span's attention: the repair that still measures, if the span is the question."""
    repair, span = sequence.request.repair, sequence.request.layout.spans[span_index]
    if repair is None or not repair.is_measuring or span.segment.kind is not SegmentKind.QUESTION:
        return None
    return QuestionObserver(repair, sequence.cached_reads[span_index].sources)


def _seen(sequence: Sequence, span_index: int) -> SpanReads:
    """Reads of the earlier spans that a span sees, cached for this allocation.

    Chunks are read in the order of their keys, so that their order in the prompt cannot change a single bit.
    """
    if (cached := sequence.cached_reads.get(span_index)) is not None:
        return cached
    assert sequence.allocation is not None
    parts = []
    for view in sequence.request.layout.spans[span_index].views:
        seen, allocated = sequence.request.layout.spans[view.span], sequence.allocation.spans[view.span]
        pieces = view_reads(seen, allocated.table, view)
        parts.append((allocated.chunk.key if allocated.chunk else b"", view.distance, view.span, pieces))
    parts.sort(key=lambda part: part[:3])
    reads = sequence.cached_reads[span_index] = SpanReads(
        tuple(piece for *_, pieces in parts for piece in pieces),
        tuple((seen_index, first) for *_, seen_index, pieces in parts for first in _first_tokens(pieces)),
    )
    return reads


def _seen_by_rows(sequence: Sequence, span: Span, first: int, num_tokens: int) -> tuple[Piece, ...]:
    """Reads of what repaired tokens see, each of them up to its own position."""
    assert sequence.allocation is not None
    spans, allocated = sequence.request.layout.spans, sequence.allocation.spans
    return tuple(
        read
        for view in span.views
        for read in view_reads(spans[view.span], allocated[view.span].table, view, first, num_tokens)
    )


def _kept_reads(sequence: Sequence, counters: WindowCounters, token: int) -> tuple[Piece, ...]:
    """Reads of what is never evicted, for a token after the first S + W: earlier spans, and the sinks."""
    assert sequence.allocation is not None
    layout, window = sequence.request.layout, counters.window
    sinks = run_reads(layout.last, sequence.allocation.last.table, 0, window.sink_tokens)
    return _following((*_seen(sequence, len(layout.spans) - 1).pieces, *sinks), window.shift(token))


def _window_reads(sequence: Sequence, counters: WindowCounters, token: int, *, reads_itself: bool) -> tuple[Piece, ...]:
    """Reads of such a token's window; keys of the previous lap are W positions before where they were computed."""
    assert sequence.allocation is not None
    span, allocated, window = sequence.request.layout.last, sequence.allocation.last, counters.window
    oldest, lap = max(window.oldest(token), counters.first_kept), window.lap_start(token)
    reads: list[Piece] = []
    for first, last, distance in (
        (oldest, lap, -window.window_tokens),
        (max(oldest, lap), token + reads_itself, 0),
    ):
        if first < last:
            position = span.start + window.position_of(first) + distance
            for run in allocated.table.runs_between(first - allocated.num_left, last - allocated.num_left):
                reads.append(Piece(pool_of(span), run.first_slot, run.num_tokens, position, distance))
                position += run.num_tokens
    return tuple(reads)


def _following(reads: Iterable[Piece], shift: int) -> tuple[Piece, ...]:
    """Reads that keep their distance from a row (and the rows after it in its group), which is `shift` further on."""
    return tuple(
        replace(read, position=read.position + shift, distance=read.distance + shift, follows=True) for read in reads
    )


def _first_tokens(pieces: tuple[Piece, ...]) -> list[int]:
    """For the reads of a whole span, the number of the first token of each."""
    return [0, *accumulate(piece.num_tokens for piece in pieces[:-1])]


def _between(span: Span, table: BlockTable, distance: int, first: int, last: int) -> Iterator[Piece]:
    """Reads of tokens `first` to `last`, exclusive."""
    number = first
    for run in table.runs_between(first, last) if first else table.runs(last):
        positions = tuple(position + distance for position in span.positions[number : number + run.num_tokens])
        position = positions[0] if positions else span.start + distance + number
        yield Piece(pool_of(span), run.first_slot, run.num_tokens, position, distance, positions=positions)
        number += run.num_tokens


def _stretches(hidden: tuple[int, ...], num_tokens: int) -> Iterator[tuple[int, int]]:
    """Ranges of tokens between hidden ones, as (first, last + 1)."""
    first = 0
    for token in (*hidden, num_tokens):
        token = min(token, num_tokens)
        if first < token:
            yield first, token
        first = token + 1


def _masked(reads: tuple[Piece, ...], seen: Visibility) -> Iterator[Piece]:
    """Each run with its part of what is visible of the whole span."""
    number = 0
    for read in reads:
        last = number + read.num_tokens
        part = Visibility(
            tuple(token - number for token in seen.hidden if number <= token < last),
            tuple(min(max(end - number, 0), read.num_tokens) for end in seen.ends),
        )
        yield replace(read, visibility=part if part.hidden or part.ends else None)
        number = last
