"""The LFU policy: evicts the least frequently used first."""

from __future__ import annotations

from kvmosaic.eviction.policy import Candidate

_HALF_SECONDS = 1e9
"""Scale of the time of the last use, so that it orders items of equal hits only."""


class LFU:
    """LFU policy: the block or chunk with the fewest cache hits is evicted first; of these, the least recently used.

    Hits are counted for as long as an item is cached. For documents whose popularity changes, `lru` is the better
    choice: what was popular once stays.
    """

    name = "lfu"

    def rank(self, candidate: Candidate) -> float:
        """Cache hits, and less than one for the time of the last use."""
        return candidate.hits + candidate.last_used / (candidate.last_used + _HALF_SECONDS)
