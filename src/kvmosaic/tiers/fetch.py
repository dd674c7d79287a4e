"""Fetch: one chunk on its way up from a tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvmosaic.cache.keys import Key
from kvmosaic.tiers.tier import Entry

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Fetch(Generic[T]):
    """What everybody who misses a chunk waits for, each only as long as it is worth.

    under way ──▶ found: `value` and `tier_name`
         └──────▶ over without a value: in no tier, or in none that is fast enough
    """

    key: Key
    num_bytes: int
    """Of the chunk on the device: what is to be loaded, before compression."""
    accept: Callable[[Entry], T] = field(repr=False)
    """Verifies an entry and decodes it; raises InvalidEntry."""
    compute_seconds: float | None
    """What computing it would take; None if nobody knows."""
    started: float
    patience: float
    """Seconds from the start, or from the last time that any fetch ended, after which nobody waits any longer."""
    value: T | None = field(default=None, repr=False)
    tier_name: str = ""
    is_persistent: bool = False
    """Whether that tier outlives the process."""
    is_over: bool = False

    def is_settled(self, now: float, last_ended: float) -> bool:
        """Whether waiting has ended, with a value or without; `last_ended` tells when some fetch was over."""
        return self.is_over or now >= max(self.started, last_ended) + self.patience
