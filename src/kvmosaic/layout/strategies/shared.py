"""Shared positions: all documents right after the system text."""

from __future__ import annotations

from typing import ClassVar

from kvmosaic.layout.strategies.strategy import PositionStrategy


class Shared(PositionStrategy):
    """Every document begins where the system text ends, where it was computed: nothing is moved."""

    name: ClassVar[str] = "shared"
    summary: ClassVar[str] = "overlap"
    overlaps: ClassVar[bool] = True

    def moves(self, chunk_context: str) -> bool:
        """Only documents that were computed without the system text, or after a part of it."""
        return chunk_context != "system"

    def position(self, start: int, cursor: int, shift: int) -> int:
        """Right after the system text; the parts of a split document follow one another."""
        return start + shift
