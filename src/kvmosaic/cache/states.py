"""States of layers that carry one from token to token, as the cache and the engine pass them on. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class SavedState:
    """The state after some token of a span. The step that computes the token fills it, and nothing changes it again.

    It lives as long as something refers to it: a chunk, a prefix entry, a running sequence.
    """

    __slots__ = ("__weakref__", "has_map", "value")

    def __init__(self, has_map: bool = False) -> None:
        self.has_map = has_map
        """Whether it also holds what its span, a chunk, does to the state before it."""
        self.value: Any = None
        """What the runner keeps here."""


@dataclass(frozen=True, slots=True)
class StateProgress:
    """From where tokens of a step continue, and where their states go."""

    before: SavedState | None
    """After the span's tokens before them; None: they are its first, and begin after the spans that it sees."""
    saves: tuple[tuple[int, SavedState], ...]
    """The state after so many of them; the last one is after all of them."""

    @property
    def last(self) -> SavedState:
        """The state after all of them."""
        return self.saves[-1][1]
