"""What an eviction policy is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a policy may know of a block or a chunk that nobody uses."""

    last_used: float
    """Seconds on the KV cache's clock when it was last allocated or released."""
    num_tokens: int
    """Tokens that leaving would free."""
    priority: float = 0.5
    """How much its owner wants it kept, 0 to 1."""
    progress: float = 1.0
    """Part of it that is computed, 0 to 1."""


@runtime_checkable
class EvictionPolicy(Protocol):
    """Eviction policy: orders unreferenced blocks.

    A policy is one method without state, so one instance serves any number of pools. A rank is asked for once, when
    something becomes idle, and stands until it is used again: it must not depend on the time of asking. Time enters as
    `last_used`, which orders idle things for good.
    """

    @property
    def name(self) -> str:
        """What configuration and reports call it."""
        ...

    def rank(self, candidate: Candidate) -> float:
        """The place in the line: the lowest rank leaves first."""
        ...
