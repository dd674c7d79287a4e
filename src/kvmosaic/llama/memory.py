"""Sequence memory: what this engine needs of llama.cpp's KV memory, and what its cells are.

A cell holds the keys and values of one token. It has one position, and a set of sequences that see it. Tagging a cell
with another sequence copies no byte; a cell without a sequence is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvmosaic.llama.state import SavedState, SequenceState


class SequenceMemory(Protocol):
    """KV memory of a llama.cpp context; ranges of positions are [first, last)."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences; their ids are 0 to num_sequences - 1."""

    def tag(self, source: int, target: int, first: int, last: int) -> None:
        """Adds `target` to the sequences of the cells of `source` in a range."""

    def untag(self, sequence: int, first: int = 0, last: int = -1) -> None:
        """Removes a sequence from its cells in a range; -1: to its end. Cells without a sequence are free."""

    def shifted(self, states: Sequence[tuple[SequenceState, int]]) -> list[SequenceState]:
        """Returns saved sequences, each moved by a distance: other positions, and keys rotated for them."""

    def save(self, sequence: int) -> SavedState:
        """Returns the cells of a sequence: positions, keys and values."""

    def load(self, sequence: int, state: SavedState) -> None:
        """Writes saved cells into free ones, for an empty sequence."""
