"""Builds the report of a composed request from the scheduler side's state."""

from __future__ import annotations

from kvmosaic.integrations.vllm.report import ChunkOutcome, ComposedReport
from kvmosaic.integrations.vllm.scheduler.composed import ComposedRequest


def report_of(composed: ComposedRequest) -> ComposedReport:
    """Reports what was reused, moved and computed, or why the request was bypassed."""
    shape, num_tokens = composed.composition, composed.request.num_prompt_tokens
    if composed.bypass is not None:
        return ComposedReport(shape, num_tokens, prefix_tokens=composed.num_cached, bypass=composed.bypass.reason)
    outcomes = []
    seen: set[int] = set()
    for piece in composed.pieces:
        if piece.chunk is not None:
            outcomes.append(ChunkOutcome("same") if piece.prompt in seen else _outcome(composed, piece.prompt))
            seen.add(piece.prompt)
    return ComposedReport(shape, num_tokens, tuple(outcomes), min(composed.num_cached, shape.end))


def _outcome(composed: ComposedRequest, prompt: int) -> ChunkOutcome:
    if prompt not in composed.asked:
        return ChunkOutcome("cached")
    if (loaded := composed.loaded.get(prompt)) is not None:
        return ChunkOutcome("cached", loaded.tier, loaded.seconds)
    return ChunkOutcome("computed" if composed.asked[prompt] else "awaited")
