"""Fetch: one chunk on its way up from a tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.tiers.tier import Entry

T = TypeVar("T")

Rank: TypeAlias = tuple[float, ...]
"""Smaller comes first."""


@dataclass(slots=True, eq=False)
class Fetch(Generic[T]):
    """What everybody who misses a chunk waits for, each only as long as it is worth.

    queued ──▶ begun ──▶ over with a value: `value` and `tier_name`
       └─────────┴─────▶ over without one: in no tier, in none that is fast enough, or nobody wants it any more
    """

    key: Key
    num_bytes: int
    """Of the chunk on the device: what is to be loaded, before compression."""
    accept: Callable[[Entry], T] = field(repr=False)
    """Verifies an entry and decodes it; raises InvalidEntry."""
    max_bytes: int | None
    """Of an entry of this key as a tier keeps it; what is larger is not read. None: as many as the tier takes."""
    compute_seconds: float | None
    """What computing it would take; None if nobody knows."""
    started: float
    timeout: float
    """Seconds after which nobody waits any longer: from the moment it begins, or, while it is queued, from the last
    time that any fetch ended."""
    rank: Rank = ()
    """Of the first in line who waits for it."""
    begun: float | None = None
    """When a reader took it up."""
    value: T | None = field(default=None, repr=False)
    tier_name: str = ""
    is_persistent: bool = False
    """Whether that tier outlives the process."""
    is_over: bool = False

    def is_settled(self, now: float, last_ended: float) -> bool:
        """Whether waiting has ended, with a value or without; `last_ended` tells when some fetch was over."""
        since = max(self.started, last_ended) if self.begun is None else self.begun
        return self.is_over or now >= since + self.timeout
