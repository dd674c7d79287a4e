"""Layouts: the position of each token and what it sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.layout.arrangement import (
        IN_FULL,
        LATER_IN_FULL,
        MIXED_UP,
        SHORT_IN_FULL,
        arrange,
        composition_of,
        with_kin,
    )
    from kvmosaic.layout.repaired_layout import exact_spans, later_tokens_seen, repair_positions, repaired
    from kvmosaic.layout.span import (
        BASE_MODEL,
        ChunkContext,
        DenseLayout,
        Layout,
        LayoutAdapter,
        Span,
        View,
        Visibility,
        chunk_mask,
        context_with,
        dense,
    )
    from kvmosaic.layout.strategies import STRATEGIES, PositionStrategy, RollingWindow, choose_strategy

# Names are imported on first use: the command line reads the names of strategies, and needs no numpy for its help.
_HOMES = {
    "arrangement": ("IN_FULL", "LATER_IN_FULL", "MIXED_UP", "SHORT_IN_FULL", "arrange", "composition_of", "with_kin"),
    "repaired_layout": ("exact_spans", "later_tokens_seen", "repair_positions", "repaired"),
    "span": (
        "BASE_MODEL",
        "ChunkContext",
        "DenseLayout",
        "Layout",
        "LayoutAdapter",
        "Span",
        "View",
        "Visibility",
        "chunk_mask",
        "context_with",
        "dense",
    ),
    "strategies": ("STRATEGIES", "PositionStrategy", "RollingWindow", "choose_strategy"),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
