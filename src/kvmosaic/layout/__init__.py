"""Layouts: the position of each token and what it sees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.lazy import lazy_names

if TYPE_CHECKING:
    from kvmosaic.layout.alike import IN_FULL, MIXED_UP, Likeness, likeness_of, with_kin
    from kvmosaic.layout.arrangement import arrange, composition_of
    from kvmosaic.layout.dense_layout import DenseLayout, dense
    from kvmosaic.layout.repaired_layout import exact_spans, later_tokens_seen, repair_positions, repaired
    from kvmosaic.layout.rolling_window import RollingWindow
    from kvmosaic.layout.span import (
        BASE_MODEL,
        UNWEIGHTED,
        ChunkContext,
        Layout,
        LayoutAdapter,
        SoftmaxWeight,
        Span,
        View,
        Visibility,
        context_with,
    )
    from kvmosaic.layout.strategies import STRATEGIES, PositionStrategy, choose_strategy

__all__ = [
    "BASE_MODEL",
    "IN_FULL",
    "MIXED_UP",
    "STRATEGIES",
    "UNWEIGHTED",
    "ChunkContext",
    "DenseLayout",
    "Layout",
    "LayoutAdapter",
    "Likeness",
    "PositionStrategy",
    "RollingWindow",
    "SoftmaxWeight",
    "Span",
    "View",
    "Visibility",
    "arrange",
    "choose_strategy",
    "composition_of",
    "context_with",
    "dense",
    "exact_spans",
    "later_tokens_seen",
    "likeness_of",
    "repair_positions",
    "repaired",
    "with_kin",
]

# Names are imported on first use: the command line reads the names of strategies, and needs no numpy for its help.
_HOMES = {
    "alike": ("IN_FULL", "MIXED_UP", "Likeness", "likeness_of", "with_kin"),
    "arrangement": ("arrange", "composition_of"),
    "dense_layout": ("DenseLayout", "dense"),
    "repaired_layout": ("exact_spans", "later_tokens_seen", "repair_positions", "repaired"),
    "rolling_window": ("RollingWindow",),
    "span": (
        "BASE_MODEL",
        "UNWEIGHTED",
        "ChunkContext",
        "Layout",
        "LayoutAdapter",
        "SoftmaxWeight",
        "Span",
        "View",
        "Visibility",
        "context_with",
    ),
    "strategies": ("STRATEGIES", "PositionStrategy", "choose_strategy"),
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
