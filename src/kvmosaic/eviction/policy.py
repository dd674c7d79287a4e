"""Eviction policy protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy knows of an unreferenced block or chunk."""

    last_used: float
    """Seconds on the KV cache's clock when it was last allocated or released; of a tier's entry, since the epoch."""
    num_tokens: int
    """Tokens that evicting it would free; 0 for an entry of a tier, which does not know them."""
    priority: float = 0.5
    """Priority given by its owner, 0 to 1."""
    progress: float = 1.0
    """Fraction that is computed, 0 to 1."""
    hits: int = 0
    """Cache hits so far."""
    compute_seconds: float = 0.0
    """Seconds that computing it took; 0 if unknown, as for blocks of prefixes."""
    num_bytes: int = 0
    """Bytes that evicting it would free, over all layers."""


@runtime_checkable
class EvictionPolicy(Protocol):
    """Eviction policy: orders unreferenced blocks and chunks.

    A policy is one stateless method, so one instance serves any number of pools. A rank is computed once, when
    something becomes idle, and holds until it is used again: it must not depend on the time of the call. Time enters as
    `last_used`, which fixes the order of idle items.
    """

    @property
    def name(self) -> str:
        """Its name in configuration and reports."""
        ...

    def rank(self, candidate: Candidate) -> float:
        """The eviction rank: the lowest is evicted first."""
        ...
