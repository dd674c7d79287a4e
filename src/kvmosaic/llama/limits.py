"""What llama.cpp cannot read of a layout: known when a prompt arrives, before it is in a step with others."""

from __future__ import annotations

from kvmosaic.layout import Layout

NUM_SEQUENCES = 256
"""Sequences of a context: the most that llama.cpp allows."""
_OTHER_SEQUENCES = 8
"""For a view, for what is written, and for what is being moved."""


def why_unreadable(layout: Layout, window: int) -> str:
    """The reason, with the way out; empty when it can be read.

    Args:
        layout: of a prompt.
        window: tokens that a token sees in layers with a sliding window; 0: all.
    """
    for span in layout.spans:
        seen = max((layout.spans[view.span].end + view.distance for view in span.views), default=span.start)
        if window and span.start - seen > window - 2:
            return (
                f"{span.segment.label} begins at position {span.start:,} and what it sees ends at {seen:,}: "
                f"{span.start - seen:,} positions are left empty, and this model allows {window - 2:,} in llama.cpp, "
                "less than its window; use a smaller position_offset, preamble='all', or engine='transformers'"
            )
        needed = sum(
            -(-layout.spans[view.span].num_tokens // (window - 1 if window else 1 << 31)) for view in span.views
        )
        if needed > NUM_SEQUENCES - _OTHER_SEQUENCES:
            parts = f", in parts of {window - 1:,} tokens at most," if window else ""
            return (
                f"the prompt has {len(layout.spans) - 1:,} texts before the question, and to see them together{parts} "
                f"takes {needed:,} sequences of llama.cpp, which has {NUM_SEQUENCES - _OTHER_SEQUENCES} for that; send "
                "fewer documents, join short ones, or take engine='transformers'"
            )
    return ""
