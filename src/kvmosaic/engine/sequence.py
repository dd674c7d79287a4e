"""Sequence: the state of one answer while it is computed, and the set of running sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from kvmosaic.attention import Piece
from kvmosaic.cache import Allocation, Key, SpanAllocation
from kvmosaic.config import EngineConfig
from kvmosaic.engine.priorities import TimeSlice, sort_key_of
from kvmosaic.engine.request import Request
from kvmosaic.engine.rolling_window import WindowCounters
from kvmosaic.layout import Layout, RollingWindow, Span
from kvmosaic.prompt import SegmentKind
from kvmosaic.sampling import Answer, SamplingState


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class SpanReads:
    """Reads of the earlier spans that a span sees."""

    pieces: tuple[Piece, ...]
    sources: tuple[tuple[int, int], ...]
    """For each of them: the span that is read, and the number of its first token."""


class Sequence:
    """One of the n answers to a request, and the blocks it holds while it runs.

        spans       system | chunk | chunk | question + answer so far + pending token
        blocks      shared   shared  shared  its own

    The newest token is `pending` until a step allocates a slot for it and computes its keys.
    """

    def __init__(self, request: Request, answer: Answer, sampling: SamplingState) -> None:
        self.request = request
        self.answer = answer
        self.sampling = sampling
        self.status = SequenceStatus.WAITING
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
        self.counters = None if request.window is None else WindowCounters(request.window)
        """Of a text with a rolling window."""
        self.cached_reads: dict[int, SpanReads] = {}
        """By span, for this allocation: reads of the earlier spans that it sees."""
        self._found_before: tuple[int, ...] = ()
        """By span: tokens that were cached before the request was planned again, repaired."""
        self.spans_before: tuple[SpanAllocation, ...] = ()
        """What was allocated then: it knows why documents were computed."""

    @property
    def window(self) -> RollingWindow | None:
        """Rolling window of its text, if any."""
        return self.request.window

    @property
    def sort_key(self) -> tuple[float, float, int]:
        """Smaller runs first."""
        return (*self._in_line, self.answer.index)

    def sort_key_from(self, time: float) -> tuple[float, float, int]:
        """Its sort key if it had arrived at `time`, or at its arrival, whichever is later."""
        request, came = self.request, max(self._in_line[1], time)
        return (sort_key_of(request.priority, came), came, self.answer.index)

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
            token_ids = self.tokens_of(last, 0, self.window.head_tokens(self._num_text))
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

    def next_tokens(self, max_tokens: int) -> tuple[int, ...]:
        """Tokens to allocate next: the pending token, or the next owed part.

        A part does not cross laps, so that its positions are consecutive.
        """
        if self.counters is None:
            assert self.pending is not None
            return (self.pending,)
        first = self._num_allocated
        return self.tokens_of(self.request.layout.last, first, self.counters.num_next(first, self.num_owed, max_tokens))

    @property
    def oldest_seen(self) -> int | None:
        """The oldest token after the sinks that the next one sees; None while the text fits into sinks and window."""
        return None if self.counters is None else self.counters.oldest_seen(self._num_allocated)

    @property
    def num_skipped(self) -> int:
        """Tokens that need not be computed, when they are next; otherwise 0."""
        return 0 if self.counters is None else self.counters.num_skipped(self._num_allocated)

    def set_allocation(self, allocation: Allocation) -> None:
        """Takes over the blocks that the KV cache has allocated."""
        self.allocation = allocation
        self.status = SequenceStatus.RUNNING
        self.pending = None
        kept = (SegmentKind.CHUNK, SegmentKind.SYSTEM, SegmentKind.TEXT)
        found = [
            span.num_computed if span.is_owner or span.chunk is None else span.num_tokens for span in allocation.spans
        ]
        for index, (span, before) in enumerate(zip(allocation.spans, self._found_before, strict=False)):
            if span.kind in kept:
                found[index] = min(found[index], before)
        self.num_reused = tuple(found)
        if self.counters is not None:
            self.counters.begin(self._num_text)
        if not self._found_before:
            self.tier_names.clear()
        self.cached_reads.clear()

    def note_fetch(self, now: float) -> None:
        """Records that a fetch from the tiers was requested."""
        self.fetching_since = now
        self.request.note_fetch(now)

    def loaded(self, span_index: int, tier_name: str, seconds: float) -> None:
        """Records that a span's chunk was loaded from a tier after the allocation."""
        num_tokens = self.request.layout.spans[span_index].num_tokens
        self.num_reused = (*self.num_reused[:span_index], num_tokens, *self.num_reused[span_index + 1 :])
        self.tier_names[span_index] = tier_name
        self.span_seconds[span_index] = seconds

    def note_work(self, span_index: int, seconds: float, begin: float) -> None:
        """Records time spent in a forward that began at `begin`, on the engine's clock."""
        self.span_seconds[span_index] = self.span_seconds.get(span_index, 0.0) + seconds
        self.request.first_scheduled_time = self.request.first_scheduled_time or begin

    def note_repair(self, seconds: float) -> None:
        """Charges time spent on choosing repaired tokens to the question."""
        assert self.request.repair is not None
        index = len(self.request.repair.layout.spans) - 1
        self.span_seconds[index] = self.span_seconds.get(index, 0.0) + seconds

    def replanned(self) -> None:
        """Records a changed layout: it waits for blocks again, and reports hits and misses of the first allocation."""
        assert self.allocation is not None
        self._found_before = self.num_reused
        self.spans_before = self.spans_before or tuple(self.allocation.spans)
        self.preempted()

    def preempted(self) -> None:
        """Records a preemption; everything is recomputed (or found cached) later."""
        self.status = SequenceStatus.WAITING
        self.pending = None
        if self.request.repair is not None:
            self.request.repair.forget()

    def tokens_of(self, span: Span, first: int, num_tokens: int) -> tuple[int, ...]:
        """Tokens of a span, from number `first` on; the last span continues with the answer."""
        last = first + num_tokens
        token_ids = span.token_ids[first:last]
        if len(token_ids) == num_tokens:
            return token_ids
        known = span.num_tokens
        return (*token_ids, *self.answer.token_ids[max(0, first - known) : last - known])


class RunningSequences:
    """The running sequences, in the order in which they were admitted."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.num_by_tenant: Counter[str] = Counter()
        """Tenants without running sequences are missing."""
        self.served: dict[str, float] = {}
        """By tenant: when one of its sequences was last admitted."""
        self._sequences: list[Sequence] = []
        self._config = config
        self._clock = clock

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    @property
    def num_free(self) -> int:
        """Sequences that may still be admitted. Answers leave a quarter of every step to prompts."""
        max_tokens = self._config.max_num_batched_tokens
        return min(self._config.max_num_seqs, max(max_tokens - max_tokens // 4, 1)) - len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that holds its blocks."""
        now = self._clock()
        self._sequences.append(sequence)
        self.num_by_tenant[sequence.tenant] += 1
        self.served[sequence.tenant] = now
        sequence.time_slice.begin(now)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, whatever becomes of it; safe for one that does not run."""
        if sequence not in self._sequences:
            return
        self._sequences.remove(sequence)
        self.num_by_tenant[sequence.tenant] -= 1
        if not self.num_by_tenant[sequence.tenant]:
            del self.num_by_tenant[sequence.tenant]
