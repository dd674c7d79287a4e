"""Masks: which earlier positions a token sees in a layer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MaskKind = Literal["full", "window", "chunked"]

_BEFORE_ALL = -(1 << 62)
"""Before every position."""


@dataclass(frozen=True, slots=True)
class MaskSpec:
    """The earlier positions that a token sees in a layer, by position as the reader sees it.

    full       every k <= q
    window     q - k < size
    chunked    q // size == k // size
    """

    kind: MaskKind = "full"
    size: int = 0
    """Positions in the window or chunk; 0 for a full mask."""

    def __post_init__(self) -> None:
        assert (self.kind == "full") == (self.size == 0) and self.size >= 0, "only windows and chunks have a size"

    def __str__(self) -> str:
        return "full" if self.kind == "full" else f"{self.kind} {self.size}"

    def lowest_seen(self, position: int) -> int:
        """Position of the earliest key that a query at `position` sees; before every position if the mask is full."""
        if self.kind == "window":
            return position - self.size + 1
        if self.kind == "chunked":
            return position // self.size * self.size
        return _BEFORE_ALL

    def max_seen(self, num_tokens: int) -> int:
        """Maximum of `num_tokens` tokens that a token right after them sees, without itself."""
        return num_tokens if self.kind == "full" else min(num_tokens, self.size)

    def max_pairs(self, num_new: int, num_before: int) -> int:
        """Maximum of pairs of query and key when `num_new` tokens are computed after `num_before` visible ones."""
        first, last = num_before + 1, num_before + num_new
        if self.kind == "full" or last <= self.size:
            return (first + last) * num_new // 2
        growing = max(0, self.size - num_before)
        return (first + self.size) * growing // 2 + self.size * (num_new - growing)


FULL = MaskSpec()
