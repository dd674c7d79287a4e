"""Sequential positions: documents one after the other, as in an ordinary prompt."""

from __future__ import annotations

from typing import ClassVar

from kvmosaic.layout.strategies.strategy import PositionStrategy


class Sequential(PositionStrategy):
    """Every document begins where the one before it ends."""

    name: ClassVar[str] = "sequential"
    summary: ClassVar[str] = "follow one another"

    def moves(self, chunk_context: str) -> bool:
        """All documents but the first."""
        return True

    def position(self, start: int, cursor: int, shift: int) -> int:
        """Right after everything before it."""
        return cursor

    def position_of_seen(self, start: int, end: int) -> int:
        """One after the other for the reading document, too."""
        return end
