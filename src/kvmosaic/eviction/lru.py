"""The LRU policy: evicts the least recently used first."""

from __future__ import annotations

from kvmosaic.eviction.policy import Candidate


class LRU:
    """LRU policy: the least recently used block or chunk is evicted first."""

    name = "lru"

    def rank(self, candidate: Candidate) -> float:
        """The time of the last use."""
        return candidate.last_used
