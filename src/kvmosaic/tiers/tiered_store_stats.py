"""Statistics of a tiered store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TieredStoreStats:
    """Chunks moved between device and tiers; counters run since the start."""

    stored: int = 0
    """Chunks that reached a tier."""
    dropped: int = 0
    """Chunks not stored because the write queue was full."""
    failed: int = 0
    """Chunks not stored because their tiers failed."""
    fetched: int = 0
    """Chunks found in a tier, verified and decoded."""
    missed: int = 0
    """Chunks in none of the available tiers."""
    skipped: int = 0
    """Tiers not asked, because computing is faster."""
    looked: int = 0
    """Probes of tiers that were too slow, without a waiting request."""
    late: int = 0
    """Chunks fetched after all requests stopped waiting."""
    invalid: int = 0
    """Invalid entries, which were quarantined."""
