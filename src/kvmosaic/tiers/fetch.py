"""Fetch: one chunk being loaded from a tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.tiers.tier import Entry

T = TypeVar("T")

Rank: TypeAlias = tuple[float, ...]
"""Smaller is fetched first."""


@dataclass(slots=True, eq=False)
class Fetch(Generic[T]):
    """A future for a chunk, shared by all requests that miss it, each with its own wait limit.

    queued ──▶ begun ──▶ over with a value: `value` and `tier_name`
       └─────────┴─────▶ over without one: in no tier, in none that is fast enough, or cancelled
    """

    key: Key
    num_bytes: int
    """Bytes of the chunk on the device, before compression."""
    accept: Callable[[Entry], T] = field(repr=False)
    """Verifies an entry and decodes it; raises InvalidEntry."""
    max_bytes: int | None
    """Maximum bytes of an entry of this key; a larger one is not read. None: the tier's own limit."""
    compute_seconds: float | None
    """Expected seconds of computing it; None if unknown."""
    started: float
    timeout: float
    """Wait limit in seconds: from the moment it begins, or, while it is queued, from the last time that any fetch
    ended."""
    rank: Rank = ()
    """Lowest rank among its waiting requests."""
    begun: float | None = None
    """When a worker began it."""
    value: T | None = field(default=None, repr=False)
    tier_name: str = ""
    is_persistent: bool = False
    """Whether that tier outlives the process."""
    is_over: bool = False

    def is_settled(self, now: float, last_ended: float) -> bool:
        """Whether waiting has ended, with a value or without; `last_ended` is when any fetch last ended."""
        since = max(self.started, last_ended) if self.begun is None else self.begun
        return self.is_over or now >= since + self.timeout
