"""Repair policy that measures once: later requests for the same prompt reuse the first choice."""

from __future__ import annotations

from collections.abc import Sequence

from kvmosaic.repair import ChunkSignals, RepairPolicy, Signal, repair_policy


class Recalled:
    """A policy with signals that remembers its choice for one prompt.

    Answer and scores of one case then read the very same tokens, and signals are measured for the first of them only.
    """

    def __init__(self, policy: RepairPolicy) -> None:
        self._policy = policy
        self._chosen: list[Sequence[int]] | None = None

    @classmethod
    def of(cls, repair: str) -> Recalled | None:
        """Wraps a policy that measures signals; returns None for any other."""
        policy = repair_policy(repair)
        return cls(policy) if policy.signals else None

    @property
    def signals(self) -> frozenset[Signal]:
        """See `RepairPolicy.signals`."""
        return self._policy.signals if self._chosen is None else frozenset()

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        if self._chosen is None:
            self._chosen = self._policy.choose(chunks)
        return self._chosen

    def __str__(self) -> str:
        return str(self._policy)
