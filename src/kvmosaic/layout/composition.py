"""The composition of a layout in words, for reuse reports."""

from __future__ import annotations

from itertools import takewhile

from kvmosaic.layout.span import UNWEIGHTED, Layout


def composition_of(layout: Layout) -> str:
    """Describes what a layout computes: exact attention, or which approximation was requested."""
    if not any(span.segment.kind == "chunk" for span in layout.spans):
        return "exact"
    apart = "documents do not see each other"
    if (index := layout.repair) is not None:
        apart += f", but for {layout.spans[index].num_tokens} repaired tokens"
    parts = [apart]
    if any(view.visibility and view.visibility.weight != UNWEIGHTED for view in layout.last.views):
        parts.append("the question weighs documents differently")
    if any(span.is_lead_in for span in layout.spans):
        parts.append("documents after the first were computed after a lead-in")
    if layout.chunk_context == "none":
        parts.append("documents did not see the system prompt")
    elif rest := _unseen_before(layout):
        seen = sum(span.num_tokens for span in layout.spans if span.segment.kind == "system")
        parts.append(f"documents saw {seen} of {seen + rest} tokens before them")
    return f"composed ({layout.strategy}): " + ", ".join(parts)


def _unseen_before(layout: Layout) -> int:
    """Tokens of texts between the preamble and the first document."""
    before = takewhile(lambda span: span.segment.kind != "chunk", layout.spans)
    return sum(span.num_tokens for span in before if span.is_text)
