"""Layouts: the position of each token and what it sees."""

from kvmosaic.layout.arrange import arrange, choose_strategy
from kvmosaic.layout.dense import DenseLayout, dense
from kvmosaic.layout.repaired import exact_spans, repair_positions, repaired
from kvmosaic.layout.rolling_window import RollingWindow
from kvmosaic.layout.span import (
    UNWEIGHTED,
    AutoStrategy,
    ChunkContext,
    FixedStrategy,
    Layout,
    PositionStrategy,
    SoftmaxWeight,
    Span,
    View,
)

__all__ = [
    "UNWEIGHTED",
    "AutoStrategy",
    "ChunkContext",
    "DenseLayout",
    "FixedStrategy",
    "Layout",
    "PositionStrategy",
    "RollingWindow",
    "SoftmaxWeight",
    "Span",
    "View",
    "arrange",
    "choose_strategy",
    "dense",
    "exact_spans",
    "repair_positions",
    "repaired",
]
