"""Peeking: reads of entries that do not count as uses, for listing and checking a tier without changing LRU order."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvmosaic.cache.keys import Key
from kvmosaic.tiers.breaker import Breaker
from kvmosaic.tiers.tier import MAX_ENTRY_BYTES, Deadline, Entry, Tier


@runtime_checkable
class Peeking(Protocol):
    """A tier that can read the start of an entry."""

    def peek(self, key: Key, num_bytes: int, deadline: Deadline) -> Entry | None:
        """The first bytes of an entry, fewer if it has fewer; None if it is absent. Not a use, not verified.

        Raises:
            TierUnavailable: the place fails.
        """
        ...


def peek(tier: Tier, key: Key, num_bytes: int = MAX_ENTRY_BYTES, *, deadline: Deadline) -> Entry | None:
    """The first bytes of an entry; a tier that cannot peek reads all of it, which counts as a use.

    Raises:
        TierUnavailable: the place fails.
    """
    tier = tier.tier if isinstance(tier, Breaker) else tier
    if isinstance(tier, Peeking):
        return tier.peek(key, num_bytes, deadline)
    return tier.get_many([key], deadline).get(key)
