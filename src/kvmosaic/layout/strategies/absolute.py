"""Absolute positions: documents where the caller says."""

from __future__ import annotations

from typing import ClassVar

from kvmosaic.layout.strategies.strategy import PositionStrategy


class Absolute(PositionStrategy):
    """Every document is computed and read at its `position_offset`."""

    name: ClassVar[str] = "absolute"
    summary: ClassVar[str] = "begin at their own offsets"
    takes_offsets: ClassVar[bool] = True

    def moves(self, chunk_context: str) -> bool:
        """Nothing is moved."""
        return False

    def position(self, start: int, cursor: int, shift: int) -> int:
        """Where it was computed."""
        return start
