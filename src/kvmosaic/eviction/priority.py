"""The priority policy: a weighted sum of priority, progress, age and size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction.policy import Candidate


@dataclass(frozen=True, slots=True)
class Priority:
    """Priority policy: keeps items of high priority that are complete, recently used and small.

        rank = 0.4 priority + 0.3 progress - 0.2 age - 0.1 size          the lowest is evicted first

        priority    0 to 1, set by the caller
        progress    0 to 1, the fraction that is computed
        age         idle time in units of `age_seconds`; unlimited, so that only pins keep an unused item indefinitely
        size        tokens in units of `size_tokens`, at most 1: evicting a large item frees more

    All idle items age at the same rate, so their order is fixed, and `last_used` can replace the age.
    """

    age_seconds: float = 3_600.0
    size_tokens: int = 4_096
    name: ClassVar[str] = "priority"

    def __post_init__(self) -> None:
        if not 0 < self.age_seconds < 1e9:
            raise InvalidConfig(f"age_seconds must be above 0 and below 1e9, got {self.age_seconds}")
        if not 1 <= self.size_tokens <= 10**9:
            raise InvalidConfig(f"size_tokens must be between 1 and 10**9, got {self.size_tokens}")

    def rank(self, candidate: Candidate) -> float:
        """The weighted sum, up to a constant that is the same for all."""
        size = min(candidate.num_tokens / self.size_tokens, 1.0)
        kept = 0.4 * candidate.priority + 0.3 * candidate.progress
        return kept + 0.2 * candidate.last_used / self.age_seconds - 0.1 * size
