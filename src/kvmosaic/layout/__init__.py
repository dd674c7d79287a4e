"""Where each token sits and what it sees."""

from kvmosaic.layout.arrange import arrange
from kvmosaic.layout.dense import DenseLayout, dense
from kvmosaic.layout.repaired import exact_spans, repaired, standing
from kvmosaic.layout.rolling import RollingWindow
from kvmosaic.layout.span import UNWEIGHTED, ChunkContext, Layout, PositionStrategy, Span, View, Weight

__all__ = [
    "UNWEIGHTED",
    "ChunkContext",
    "DenseLayout",
    "Layout",
    "PositionStrategy",
    "RollingWindow",
    "Span",
    "View",
    "Weight",
    "arrange",
    "dense",
    "exact_spans",
    "repaired",
    "standing",
]
