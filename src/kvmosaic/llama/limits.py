"""What llama.cpp cannot read of a layout: known when a prompt arrives, before it is in a step with others."""

from __future__ import annotations

from kvmosaic.layout import Layout, later_tokens_seen

NUM_SEQUENCES = 255
"""Sequences of a context: the most that llama.cpp allows, but one, which pads forwards."""


def why_unreadable(layout: Layout, window: int) -> str:
    """The reason, with the way out; empty when it can be read. Without windows everything can.

    Args:
        layout: of a prompt.
        window: tokens that a token sees in layers with a sliding window; 0: all.
    """
    if not window:
        return ""
    if text := later_tokens_seen(layout):
        return (
            f"{text}, which llama.cpp hides from models with sliding windows; use position_offsets that do not "
            "overlap, or engine='transformers'"
        )
    for span in layout.spans:
        seen = max((layout.spans[view.span].end + view.distance for view in span.views), default=span.start)
        if span.start - seen > window - 2:
            return (
                f"{span.segment.label} begins at position {span.start:,} and what it sees ends at {seen:,}: "
                f"{span.start - seen:,} positions are left empty, and this model allows {window - 2:,} in llama.cpp, "
                "less than its window; use a smaller position_offset, preamble='all', or engine='transformers'"
            )
    return ""
