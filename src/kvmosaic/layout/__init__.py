"""Layouts: the position of each token and what it sees."""

from kvmosaic.layout.arrange import arrange, choose_strategy
from kvmosaic.layout.dense import DenseLayout, dense
from kvmosaic.layout.repaired import exact_spans, repair_positions, repaired
from kvmosaic.layout.rolling import RollingWindow
from kvmosaic.layout.span import (
    UNWEIGHTED,
    AutoStrategy,
    ChunkContext,
    FixedStrategy,
    Layout,
    PositionStrategy,
    Span,
    View,
    Weight,
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
    "Span",
    "View",
    "Weight",
    "arrange",
    "choose_strategy",
    "dense",
    "exact_spans",
    "repair_positions",
    "repaired",
]
