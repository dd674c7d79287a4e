"""Sequence: the state of one answer while it is computed."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from itertools import accumulate, pairwise
from typing import Any

from kvmosaic.attention import AttentionObserver, Piece
from kvmosaic.cache import Allocation, Key
from kvmosaic.engine.priorities import TimeSlice, sort_key_of
from kvmosaic.engine.request import Request
from kvmosaic.engine.request_repair import QuestionObserver
from kvmosaic.engine.rolling_window import moved
from kvmosaic.engine.span_reads import pool_of, run_reads, view_reads
from kvmosaic.layout import Layout, RollingWindow, Span
from kvmosaic.model.batch import SpanRows
from kvmosaic.prompt import SegmentKind
from kvmosaic.sampling import Answer, SamplingState


class SequenceState(Enum):
    """Lifecycle state of a sequence."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One of the n answers to a request, and the blocks it holds while it runs.

        spans       system | chunk | chunk | question + answer so far + pending token
        blocks      shared   shared  shared  its own

    The newest token is `pending` until a step allocates a slot for it and computes its keys.

    With a rolling window only the head of the text is allocated (see `RollingWindow.head_tokens`). The rest is *owed*:
    it is allocated, computed and evicted in parts, prompt and answer alike.
    """

    def __init__(self, request: Request, answer: Answer, sampling: SamplingState) -> None:
        self.request = request
        self.answer = answer
        self.sampling = sampling
        self.state = SequenceState.WAITING
        self.pending: int | None = None
        self.allocation: Allocation | None = None
        self.allocate_seconds = 0.0
        """Time to plan and allocate, at the last allocation."""
        self.span_seconds: dict[int, float] = {}
        """Time spent in forwards, by span."""
        self.num_reused: tuple[int, ...] = ()
        """By span: cached tokens at allocation."""
        self.fetches: dict[Key, Any] | None = None
        """In-flight fetches from the tiers; None before they are requested, and once all is allocated."""
        self.fetching_since = 0.0
        """When the last of them were requested, on the engine's clock."""
        self.tier_names: dict[int, str] = {}
        """By span: the tier that it was loaded from."""
        self.num_worked = 0
        """Tokens computed for it so far, including recomputed ones."""
        self.num_worked_before = 0
        """The same at its last preemption."""
        self.last_step = 0
        """Number of the last step that decoded a token of its answer."""
        self.time_slice = TimeSlice()
        """Running time since it was last allocated."""
        self._in_line = (request.sort_key, request.arrival_time)
        """Sort key at arrival, or when it was requeued."""
        self.window = request.window
        self._num_head = 0
        """Tokens of the first allocation."""
        self._first_kept = 0
        """The first token after the sinks that was not skipped."""
        self._view_reads: dict[int, tuple[Piece, ...]] = {}
        self._read_tokens: dict[int, tuple[tuple[int, int], ...]] = {}
        """By span, for each of these reads: the span that is read, and the number of its first token."""
        self._found_before: tuple[int, ...] = ()
        """By span: tokens that were cached before the request was planned again, repaired."""

    @property
    def sort_key(self) -> tuple[float, float, int]:
        """Smaller runs first."""
        return (*self._in_line, self.answer.index)

    def sort_key_from(self, time: float) -> tuple[float, float, int]:
        """Its sort key if it had arrived at `time`, or at its arrival, whichever is later."""
        request, came = self.request, max(self._in_line[1], time)
        return (sort_key_of(request.priority, came, request.aging_seconds), came, self.answer.index)

    def requeue(self, now: float) -> None:
        """Queues it after all that have arrived so far, as if it arrived now."""
        self._in_line = self.sort_key_from(now)[:2]

    @property
    def tenant(self) -> str:
        """The tenant of its request."""
        return self.request.prompt.tenant

    @property
    def is_stale(self) -> bool:
        """Whether a chunk that it reads was dropped."""
        assert self.allocation is not None
        return self.allocation.is_stale

    @property
    def num_done(self) -> int:
        """Tokens that are computed, including tokens evicted from a rolling window, or skipped."""
        assert self.allocation is not None
        return sum(span.num_computed for span in self.allocation.spans) + self.allocation.last.num_left

    @property
    def was_replanned(self) -> bool:
        """Whether its layout has changed since its first allocation."""
        return bool(self._found_before)

    @property
    def num_tokens_left(self) -> int:
        """Remaining tokens of the answer, as far as they are limited."""
        return max((self.answer.rules.max_tokens or 0) - self.answer.num_tokens, 0)

    @property
    def layout(self) -> Layout:
        """The layout to allocate: the request's, its last span extended by the answer so far (after a preemption).

        With a rolling window, only its head.
        """
        layout, last = self.request.layout, self.request.layout.last
        if self.window is not None:
            token_ids = self._tokens(last, 0, self.window.head_tokens(self._num_text))
        elif self.answer.token_ids:
            token_ids = (*last.token_ids, *self.answer.token_ids)
        else:
            return layout
        longer = replace(last, segment=replace(last.segment, token_ids=token_ids))
        return replace(layout, spans=(*layout.spans[:-1], longer))

    @property
    def is_prefilled(self) -> bool:
        """Whether all tokens of the allocated spans are computed, and none are owed."""
        return self._is_computed and not self.num_owed

    @property
    def is_reading(self) -> bool:
        """Whether prompt tokens are to be computed next (prefill), not the one sampled last (decode)."""
        return self.pending is None and not self.is_prefilled

    @property
    def _is_computed(self) -> bool:
        assert self.allocation is not None
        return all(span.num_computed == span.num_tokens for span in self.allocation.spans)

    @property
    def num_owed(self) -> int:
        """Tokens of a text with a rolling window that are not allocated yet; 0 without one."""
        if self.window is None:
            return 0
        return self._num_text - self._num_allocated

    @property
    def must_roll(self) -> bool:
        """Whether the next owed part must be allocated before anything else can be computed."""
        return self.num_owed > 0 and self.pending is None and self._is_computed

    @property
    def _num_text(self) -> int:
        """Tokens of question (or plain prompt) and answer so far."""
        return self.request.layout.last.num_tokens + len(self.answer.token_ids)

    @property
    def _num_allocated(self) -> int:
        """Tokens of these that are or were allocated, including skipped ones."""
        assert self.allocation is not None
        return self.allocation.last.num_tokens + self.allocation.last.num_left

    def next_tokens(self, most: int) -> tuple[int, ...]:
        """Tokens to allocate next: the pending token, or the next owed part.

        A part does not cross laps, so that its positions are consecutive.
        """
        if self.window is None:
            assert self.pending is not None
            return (self.pending,)
        first = self._num_allocated
        return self._tokens(
            self.request.layout.last, first, min(self.num_owed, most, self.window.lap_end(first) - first)
        )

    @property
    def oldest_seen(self) -> int | None:
        """The oldest token after the sinks that the next one sees; None while the text fits into sinks and window."""
        if self.window is None or self._num_allocated < self.window.num_positions:
            return None
        return max(self.window.oldest(self._num_allocated), self._first_kept)

    @property
    def num_left_out(self) -> int:
        """Tokens that need not be computed, when they are next; otherwise 0."""
        if self.window is None or self._num_allocated != self._num_head or self._first_kept < self.window.num_positions:
            return 0
        return self._first_kept - self._num_head

    def set_allocation(self, allocation: Allocation) -> None:
        """Takes over the blocks that the KV cache has allocated."""
        self.allocation = allocation
        self.state = SequenceState.RUNNING
        self.pending = None
        self.num_reused = tuple(
            0 if span.is_owner else span.num_tokens if span.chunk else span.num_computed for span in allocation.spans
        )
        kept = [span.chunk is not None or span.kind is SegmentKind.SYSTEM for span in allocation.spans]
        self.num_reused = tuple(
            min(count, self._found_before[index]) if index < len(self._found_before) and kept[index] else count
            for index, count in enumerate(self.num_reused)
        )
        if self.window is not None:
            self._num_head = self.window.head_tokens(self._num_text)
            self._first_kept = self.window.replay_from(self._num_text)
        if not self._found_before:
            self.tier_names.clear()
        self._forget_reads()

    def loaded(self, span_index: int, tier_name: str, seconds: float) -> None:
        """Records that a span's chunk was loaded from a tier after the allocation."""
        num_tokens = self.request.layout.spans[span_index].num_tokens
        self.num_reused = (*self.num_reused[:span_index], num_tokens, *self.num_reused[span_index + 1 :])
        self.tier_names[span_index] = tier_name
        self.span_seconds[span_index] = seconds

    def replanned(self) -> None:
        """Records a changed layout: it waits for blocks again, and reports the cache hits of its first allocation."""
        self._found_before = self.num_reused
        self.preempted()

    def preempted(self) -> None:
        """Records a preemption; everything is recomputed (or found cached) later."""
        self.state = SequenceState.WAITING
        self.pending = None
        self._forget_reads()
        if self.request.repair is not None:
            self.request.repair.forget()

    def rows(self, span_index: int, first: int, num_tokens: int, num_logits: int) -> list[SpanRows]:
        """Rows of `num_tokens` tokens of a span, from token number `first` on.

        Repaired tokens of each chunk get separate rows, so that none of them reads chunks that it does not see.
        """
        last = first + num_tokens
        parts = self.request.layout.spans[span_index].parts
        cuts = [first, *(number for number in parts if first < number < last), last]
        return [self._rows(span_index, start, stop - start, num_logits) for start, stop in pairwise(cuts)]

    def _rows(self, span_index: int, first: int, num_tokens: int, num_logits: int) -> SpanRows:
        assert self.allocation is not None
        span, allocated = self.request.layout.spans[span_index], self.allocation.spans[span_index]
        token, reads_itself = first + allocated.num_left, num_tokens == 1
        place, limit = token, 0
        if self.window is not None and span is self.request.layout.last and token >= self.window.num_positions:
            place, limit = self.window.position_of(token), self.window.window_tokens
            reads = (*self._kept_reads(self.window, token), *self._window_reads(self.window, token, reads_itself))
        else:
            seen = self._seen_by_rows(span, first, num_tokens) if span.is_repair else self._seen(span_index)
            reads = (*seen, *run_reads(span, allocated.table, 0, first + reads_itself))
        positions = span.positions[first : first + num_tokens]
        return SpanRows(
            token_ids=self._tokens(span, token, num_tokens),
            position=positions[0] if positions else span.start + place,
            pool=pool_of(span),
            slots=allocated.table.slots(first, num_tokens),
            reads=reads,
            reads_itself=reads_itself,
            num_logits=num_logits,
            window=0 if reads_itself else limit,  # a single row reads what it sees, and nothing else
            positions=positions,
            watch=self._watch(span_index),
        )

    def _watch(self, span_index: int) -> AttentionObserver | None:
        """Observer of a span's attention: the repair that still measures, if the span is the question."""
        repair = self.request.repair
        if repair is None or not repair.is_measuring or self.layout.spans[span_index].segment.kind != "question":
            return None
        return QuestionObserver(repair, self._read_tokens[span_index])

    def _tokens(self, span: Span, first: int, num_tokens: int) -> tuple[int, ...]:
        """Tokens of a span; the last one continues with the answer."""
        last = first + num_tokens
        token_ids = span.token_ids[first:last]
        if len(token_ids) == num_tokens:
            return token_ids
        known = span.num_tokens
        return (*token_ids, *self.answer.token_ids[max(0, first - known) : last - known])

    def _seen(self, span_index: int) -> tuple[Piece, ...]:
        """Reads of the earlier spans that a span sees.

        Chunks are read in the order of their keys, so that their order in the prompt cannot change a single bit.
        """
        reads = self._view_reads.get(span_index)
        if reads is None:
            assert self.allocation is not None
            parts = []
            for view in self.request.layout.spans[span_index].views:
                seen, allocated = self.request.layout.spans[view.span], self.allocation.spans[view.span]
                runs = view_reads(seen, allocated.table, view)
                parts.append((allocated.chunk.key if allocated.chunk else b"", view.distance, view.span, runs))
            parts.sort(key=lambda part: part[:3])
            reads = self._view_reads[span_index] = tuple(read for *_, runs in parts for read in runs)
            self._read_tokens[span_index] = tuple(
                (seen_index, first) for *_, seen_index, runs in parts for first in _first_tokens(runs)
            )
        return reads

    def _forget_reads(self) -> None:
        self._view_reads.clear()
        self._read_tokens.clear()

    def _seen_by_rows(self, span: Span, first: int, num_tokens: int) -> tuple[Piece, ...]:
        """Reads of what repaired tokens see, each of them up to its own position."""
        assert self.allocation is not None
        return tuple(
            read
            for view in span.views
            for read in view_reads(
                self.request.layout.spans[view.span], self.allocation.spans[view.span].table, view, first, num_tokens
            )
        )

    def _kept_reads(self, window: RollingWindow, token: int) -> tuple[Piece, ...]:
        """Reads of what is never evicted, for a token after the first S + W: earlier spans, and the sinks."""
        assert self.allocation is not None
        layout, shift = self.request.layout, window.shift(token)
        sinks = run_reads(layout.last, self.allocation.last.table, 0, window.sink_tokens)
        return moved((*self._seen(len(layout.spans) - 1), *sinks), shift)

    def _window_reads(self, window: RollingWindow, token: int, reads_itself: bool) -> tuple[Piece, ...]:
        """Reads of such a token's window; keys of the previous lap are W positions before where they were computed."""
        assert self.allocation is not None
        span, allocated = self.request.layout.last, self.allocation.last
        oldest, lap = max(window.oldest(token), self._first_kept), window.lap_start(token)
        reads: list[Piece] = []
        for first, last, distance in (
            (oldest, lap, -window.window_tokens),
            (max(oldest, lap), token + reads_itself, 0),
        ):
            if first < last:
                position = span.start + window.position_of(first) + distance
                runs = allocated.table.runs_between(first - allocated.num_left, last - allocated.num_left)
                for run in runs:
                    reads.append(Piece(pool_of(span), run.first_slot, run.num_tokens, position, distance))
                    position += run.num_tokens
        return tuple(reads)


def _first_tokens(reads: tuple[Piece, ...]) -> list[int]:
    """For the reads of a whole span, the number of the first token of each."""
    return [0, *accumulate(read.num_tokens for read in reads[:-1])]
