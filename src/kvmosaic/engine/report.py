"""Reuse report of a running request: the cost of each segment."""

from __future__ import annotations

from kvmosaic.cache import Allocation, SpanAllocation
from kvmosaic.engine.sequence import Sequence
from kvmosaic.layout import Span, composition_of
from kvmosaic.prompt import Segment
from kvmosaic.sampling import RepairUse, ReuseReport, SegmentReuse
from kvmosaic.sampling.reuse import MissReason, segment_action


def reuse_report(sequence: Sequence, time_to_first_token: float | None) -> ReuseReport:
    """Builds the report of a sequence that still holds its blocks."""
    allocation, layout = sequence.allocation, sequence.request.layout
    assert allocation is not None
    num_found = sum(count > 0 for count in sequence.num_reused)
    window = sequence.window
    max_found = window.sink_tokens + window.window_tokens if window is not None else None
    segments = []
    for index, (span, allocated) in enumerate(zip(layout.spans, allocation.spans, strict=True)):
        if span.is_repair or span.is_companion:
            continue
        num_reused = min(sequence.num_reused[index], span.num_tokens)
        if span.is_chunk and sequence.spans_before:
            allocated = sequence.spans_before[index]
        seconds = sequence.span_seconds.get(index) or sequence.allocate_seconds / max(num_found, 1)
        distance = 0 if sequence.request.is_warm_up else layout.position_of(index) - span.start
        segments.append(
            SegmentReuse(
                kind=str(span.segment.kind),
                name=span.segment.name,
                num_tokens=span.num_tokens,
                action=segment_action(num_reused, span.num_tokens, distance),
                distance=distance,
                reused_tokens=num_reused,
                num_blocks=len(allocated.table.block_ids),
                milliseconds=seconds * 1e3,
                tier=sequence.tier_names.get(index) or ("device" if num_reused else None),
                miss=_miss(allocated, num_reused),
                note=_joined(
                    _origin_note(span.segment),
                    _kept_note(num_reused, span, allocated),
                    _note(allocated, allocation, sequence.tier_names.get(index)),
                    span.segment.remark,
                )
                or _history_note(num_reused, span.num_tokens, span.segment.history_tokens, bool(span.views), max_found),
            )
        )
    note = f"; {sequence.request.note}" if sequence.request.note else ""
    if window is not None:
        note += f"; tokens see the first {window.sink_tokens} and the newest {window.window_tokens} tokens"
        num_tokens = layout.spans[-1].num_tokens
        if (first := window.replay_from(num_tokens)) > window.sink_tokens:
            num_left_out = first - window.head_tokens(num_tokens)
            note += f"; {num_left_out} of those between can change nothing and were not computed"
    placed = sequence.request.placed
    composition = composition_of(layout, placed.max_positions, is_auto=placed.is_auto, remark=placed.remark) + note
    return ReuseReport(tuple(segments), time_to_first_token, composition, _repair_use(sequence))


def _repair_use(sequence: Sequence) -> RepairUse | None:
    """What was repaired, and its cost."""
    request, repair = sequence.request, sequence.request.repair
    if repair is None or request.is_warm_up:
        return None
    seconds = sum(sequence.span_seconds.values()) if repair.is_full else 0.0
    num_found = sequence.num_reused[0] if repair.is_full else 0
    index = request.layout.repair
    if index is not None:
        seconds = sequence.span_seconds.get(index, 0.0)
        num_found = min(sequence.num_reused[index], request.layout.spans[index].num_tokens)
    return repair.use(request.layout, num_found, seconds)


def _history_note(num_reused: int, num_tokens: int, num_history: int, sees_others: bool, max_found: int | None) -> str:
    """Describes the reuse of earlier conversation turns; the token that ended an answer was sampled but never computed.

    With a rolling window only the first `max_found` tokens saw what they see in a prompt, and can be cache hits.
    """
    if not num_history:
        return ""
    found = min(num_reused, num_history)
    if not found:
        place = " after these documents" if sees_others else ""
        return f"none of the {num_history} tokens of earlier turns is cached{place}"
    told = f"{found} of {num_tokens} tokens from earlier turns"
    if num_reused > found:
        told += f", {num_reused - found} more from a prompt that goes on alike"
    missing = num_history - found
    if missing <= 1:
        return told
    if max_found is not None and found >= max_found - 1:
        return f"{told}; {missing} more of theirs are beyond the first {max_found}, which a rolling window can reuse"
    return f"{told}; {missing} more of theirs are now written in other tokens, or were evicted"


def _origin_note(segment: Segment) -> str:
    """How a document was found in the text, and which part of it a chunk is."""
    return _joined(f"found in the text ({segment.origin})" if segment.origin else "", _split_note(segment))


def _split_note(segment: Segment) -> str:
    if segment.part is None:
        return ""
    number, count = segment.part
    if segment.is_section:
        return f"section {number} of {count} of a document"
    if segment.continues and not segment.document_offset:
        return f"part {number} of {count} of a document that is longer than the model's positions: its parts overlap"
    return f"part {number} of {count} of a document that is longer than a chunk may be"


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _miss(allocated: SpanAllocation, num_reused: int) -> MissReason | None:
    """Why a document is computed, as far as the cache knows."""
    if not allocated.is_owner or num_reused == allocated.num_tokens:
        return None
    if allocated.was_evicted:
        return "evicted"
    return allocated.twin or "never_seen"


def _kept_note(num_reused: int, span: Span, allocated: SpanAllocation) -> str:
    if not allocated.is_owner or not 0 < num_reused < span.num_tokens:
        return ""
    if allocated.awaited_start:
        return f"first {num_reused} of {span.num_tokens} tokens computed once, with a document that begins alike"
    return f"first {num_reused} of {span.num_tokens} tokens kept from an earlier text"


def _note(allocated: SpanAllocation, allocation: Allocation, tier_name: str | None) -> str:
    codec = allocated.chunk.codec if allocated.chunk is not None else ""
    if tier_name is not None:
        return f"loaded from {tier_name}, {codec}" if codec else f"loaded from {tier_name}"
    if codec:
        return f"stored as {codec}"
    if allocated.twin:
        return f"cached {'after another system text' if allocated.twin == 'other_system_text' else 'for another place'}"
    if allocated.action != "wait":
        return ""
    here = any(other.is_owner and other.chunk is allocated.chunk for other in allocation.spans)
    return "same document as another one here" if here else "computed by another request"
