"""The composition of a layout in words, for reuse reports."""

from __future__ import annotations

from itertools import takewhile

from kvmosaic.layout.span import UNWEIGHTED, Layout


def composition_of(layout: Layout, max_positions: int | None = None, *, is_auto: bool = False, remark: str = "") -> str:
    """Describes what a layout computes: exact attention, or which approximation was requested.

    Args:
        layout: of a prompt.
        max_positions: positions that the model was trained for, or that are allowed; a longer prompt is named.
        is_auto: whether the length of the prompt decided on the strategy.
        remark: on documents that are alike.
    """
    if not any(span.is_chunk for span in layout.spans):
        return f"exact: {remark}" if remark else "exact"
    apart = "documents do not see each other"
    if (index := layout.repair) is not None:
        apart += f", but for {layout.spans[index].num_tokens} repaired tokens"
    parts = [apart]
    if any(view.visibility and view.visibility.weight != UNWEIGHTED for view in layout.last.views):
        parts.append("the question weighs documents differently")
    if any(span.is_companion for span in layout.spans):
        parts.append("documents after the first were computed after companions")
    if remark:
        parts.append(remark)
    if layout.chunk_context == "none":
        parts.append("documents did not see the system prompt")
    elif rest := _unseen_before(layout):
        seen = sum(span.num_tokens for span in layout.spans if span.segment.kind == "system")
        parts.append(f"documents saw {seen} of {seen + rest} tokens before them")
    if max_positions is not None and layout.num_tokens >= max_positions:  # and one more for the answer
        reason = ", so auto lets documents overlap" if is_auto and layout.rules.overlaps else ""
        parts.append(
            f"the prompt's {layout.num_tokens:,} tokens do not fit the model's {max_positions:,} positions{reason}"
        )
    return f"composed ({layout.strategy}): " + ", ".join(parts)


def _unseen_before(layout: Layout) -> int:
    """Tokens of texts between the preamble and the first document."""
    before = takewhile(lambda span: span.segment.kind != "chunk", layout.spans)
    return sum(span.num_tokens for span in before if span.is_text)
