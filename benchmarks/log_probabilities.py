"""How far two readings of the same tokens are apart, by their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Nearness:
    """Sums over tokens, each of which both readings predict."""

    divergence: float = 0.0
    num_equal: int = 0
    num_tokens: int = 0

    def add(self, expected: Tensor, found: Tensor) -> None:
        """Adds log-probabilities [R, V] of both."""
        self.divergence += float((expected.exp() * (expected - found)).sum())
        self.num_equal += int((expected.argmax(-1) == found.argmax(-1)).sum())
        self.num_tokens += len(expected)

    def row(self) -> dict[str, float]:
        """Means."""
        return {"divergence": self.divergence / self.num_tokens, "agreement": self.num_equal / self.num_tokens}
