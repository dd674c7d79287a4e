"""Layouts: the position of each token and what it sees."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmosaic.layout.arrangement import arrange
    from kvmosaic.layout.dense_layout import DenseLayout, dense
    from kvmosaic.layout.repaired_layout import exact_spans, repair_positions, repaired
    from kvmosaic.layout.rolling_window import RollingWindow
    from kvmosaic.layout.span import UNWEIGHTED, ChunkContext, Layout, SoftmaxWeight, Span, View
    from kvmosaic.layout.strategies import STRATEGIES, PositionStrategy, choose_strategy

__all__ = [
    "STRATEGIES",
    "UNWEIGHTED",
    "ChunkContext",
    "DenseLayout",
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

# Names are imported on first use: the command line reads the names of strategies, and needs no numpy for its help.
_HOMES = {
    "arrangement": ("arrange",),
    "dense_layout": ("DenseLayout", "dense"),
    "repaired_layout": ("exact_spans", "repair_positions", "repaired"),
    "rolling_window": ("RollingWindow",),
    "span": ("UNWEIGHTED", "ChunkContext", "Layout", "SoftmaxWeight", "Span", "View"),
    "strategies": ("STRATEGIES", "PositionStrategy", "choose_strategy"),
}


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'kvmosaic.layout' has no attribute {name!r}")
    return getattr(import_module(f"kvmosaic.layout.{home}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
