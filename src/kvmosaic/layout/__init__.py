"""Where each token sits and what it sees."""

from kvmosaic.layout.arrange import arrange
from kvmosaic.layout.dense import DenseLayout, dense
from kvmosaic.layout.rolling import RollingWindow
from kvmosaic.layout.span import ChunkContext, Layout, PositionStrategy, Span, View

__all__ = [
    "ChunkContext",
    "DenseLayout",
    "Layout",
    "PositionStrategy",
    "RollingWindow",
    "Span",
    "View",
    "arrange",
    "dense",
]
