"""A sequence: one answer while it is being computed."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from typing import Any

from kvmosaic.attention import PoolName, RunRead
from kvmosaic.cache import Attachment, BlockTable, Key
from kvmosaic.engine.request import Request
from kvmosaic.layout import Layout, Span
from kvmosaic.model.batch import SpanRows
from kvmosaic.prompt import SegmentKind
from kvmosaic.sampling import Answer, SamplingState


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """One of the n answers to a request, and the blocks it holds while it runs.

        spans       system | chunk | chunk | question + answer so far + pending token
        blocks      shared   shared  shared  its own

    The newest token is `pending` until a step makes room for it and computes its keys.
    """

    def __init__(self, request: Request, answer: Answer, sampling: SamplingState) -> None:
        self.request = request
        self.answer = answer
        self.sampling = sampling
        self.state = SequenceState.WAITING
        self.pending: int | None = None
        self.attachment: Attachment | None = None
        self.attach_seconds = 0.0
        """Time to plan and attach, of the last time."""
        self.span_seconds: dict[int, float] = {}
        """Time spent in forwards, by span."""
        self.num_reused: tuple[int, ...] = ()
        """By span: tokens that were found when it was attached."""
        self.fetches: dict[Key, Any] | None = None
        """Chunks on their way from the tiers; None before they are asked for, and when all is attached."""
        self.fetching_since = 0.0
        """When the last of them were asked for, on the engine's clock."""
        self.tier_names: dict[int, str] = {}
        """By span: the tier that it was loaded from."""
        self._view_reads: dict[int, tuple[RunRead, ...]] = {}

    @property
    def rank(self) -> tuple[int, float, int]:
        """Smaller runs first."""
        return (-self.request.priority, self.request.arrival_time, self.answer.index)

    @property
    def layout(self) -> Layout:
        """What to attach: the request's layout, its last span grown by the answer so far (after a preemption)."""
        layout = self.request.layout
        if not self.answer.token_ids:
            return layout
        last = layout.last
        token_ids = (*last.token_ids, *self.answer.token_ids)
        longer = replace(last, segment=replace(last.segment, token_ids=token_ids))
        return replace(layout, spans=(*layout.spans[:-1], longer))

    @property
    def is_prefilled(self) -> bool:
        """Whether all tokens of the attached spans are computed."""
        assert self.attachment is not None
        return all(span.num_computed == span.num_tokens for span in self.attachment.spans)

    def attached(self, attachment: Attachment) -> None:
        """Takes the blocks that the planner has attached."""
        self.attachment = attachment
        self.state = SequenceState.RUNNING
        self.pending = None
        self.num_reused = tuple(
            0 if span.is_owner else span.num_tokens if span.chunk else span.num_computed for span in attachment.spans
        )
        self.tier_names.clear()
        self._view_reads.clear()

    def loaded(self, span_index: int, tier_name: str, seconds: float) -> None:
        """Notes that the chunk of a span was copied from a tier after it was attached."""
        num_tokens = self.request.layout.spans[span_index].num_tokens
        self.num_reused = (*self.num_reused[:span_index], num_tokens, *self.num_reused[span_index + 1 :])
        self.tier_names[span_index] = tier_name
        self.span_seconds[span_index] = seconds

    def preempted(self) -> None:
        """Notes that the blocks were taken away; everything is computed (or found) again later."""
        self.state = SequenceState.WAITING
        self.pending = None
        self._view_reads.clear()

    def rows(self, span_index: int, first: int, num_tokens: int, wants_logits: bool) -> SpanRows:
        """The rows of `num_tokens` tokens of a span, from token number `first` on."""
        assert self.attachment is not None
        span, table = self.request.layout.spans[span_index], self.attachment.spans[span_index].table
        reads_itself = num_tokens == 1
        own = _run_reads(span, table, 0, first + reads_itself)
        return SpanRows(
            token_ids=self._tokens(span, first, num_tokens),
            position=span.start + first,
            pool=_pool(span),
            slots=table.slots(first, num_tokens),
            reads=(*self._seen(span_index), *own),
            reads_itself=reads_itself,
            wants_logits=wants_logits,
        )

    def _tokens(self, span: Span, first: int, num_tokens: int) -> tuple[int, ...]:
        """Tokens of a span; those of the last one go on with the answer."""
        last = first + num_tokens
        token_ids = span.token_ids[first:last]
        if len(token_ids) == num_tokens:
            return token_ids
        known = span.num_tokens
        return (*token_ids, *self.answer.token_ids[max(0, first - known) : last - known])

    def _seen(self, span_index: int) -> tuple[RunRead, ...]:
        """Reads of the earlier spans that a span sees.

        Chunks are read in the order of their keys, so that the order of the prompt cannot change a single bit.
        """
        reads = self._view_reads.get(span_index)
        if reads is None:
            assert self.attachment is not None
            parts = []
            for view in self.request.layout.spans[span_index].views:
                seen, attached = self.request.layout.spans[view.span], self.attachment.spans[view.span]
                runs = _run_reads(seen, attached.table, view.distance, seen.num_tokens)
                parts.append((attached.chunk.key if attached.chunk else b"", view.distance, runs))
            parts.sort(key=lambda part: part[:2])
            reads = self._view_reads[span_index] = tuple(read for *_, runs in parts for read in runs)
        return reads


def _pool(span: Span) -> PoolName:
    return "chunk_cache" if span.segment.kind is SegmentKind.CHUNK else "request"


def _run_reads(span: Span, table: BlockTable, distance: int, num_tokens: int) -> tuple[RunRead, ...]:
    """Reads of the first `num_tokens` tokens of a span, moved by `distance`."""
    reads = []
    position = span.start + distance
    for run in table.runs(num_tokens):
        reads.append(RunRead(_pool(span), run.first_slot, run.num_tokens, position, distance))
        position += run.num_tokens
    return tuple(reads)
