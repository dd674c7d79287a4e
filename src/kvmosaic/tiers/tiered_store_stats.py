"""What a tiered store has moved, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TieredStoreStats:
    """What has been moved; counters run since the start."""

    stored: int = 0
    """Chunks that reached a tier."""
    dropped: int = 0
    """Chunks that were not stored because too much waited to be written."""
    failed: int = 0
    """Chunks that could not be stored: their tiers failed."""
    fetched: int = 0
    """Chunks that were found in a tier, verified and decoded."""
    missed: int = 0
    """Chunks that were in no tier that could be asked."""
    skipped: int = 0
    """Tiers that were not asked, because computing is faster."""
    looked: int = 0
    """Tiers that were asked all the same, with nobody waiting: are they faster by now?"""
    late: int = 0
    """Chunks that came when nobody waited any longer."""
    invalid: int = 0
    """Entries that were not what they should be, and were put aside."""
