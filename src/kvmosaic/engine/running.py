"""Running sequences: those that hold blocks, counted by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from kvmosaic.config import EngineConfig
from kvmosaic.engine.sequence import Sequence


class RunningSequences:
    """The running sequences, in the order in which they were admitted."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float]) -> None:
        self.num_by_tenant: Counter[str] = Counter()
        """Tenants without running sequences are missing."""
        self.served: dict[str, float] = {}
        """By tenant: when one of its sequences was last admitted."""
        self._sequences: list[Sequence] = []
        self._config = config
        self._clock = clock

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._sequences

    @property
    def num_free(self) -> int:
        """Sequences that may still be admitted. Answers leave a quarter of every step to prompts."""
        max_tokens = self._config.max_batched_tokens
        return min(self._config.max_running, max(max_tokens - max_tokens // 4, 1)) - len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that holds its blocks."""
        now = self._clock()
        self._sequences.append(sequence)
        self.num_by_tenant[sequence.tenant] += 1
        self.served[sequence.tenant] = now
        sequence.time_slice.begin(now)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, whatever becomes of it; safe for one that does not run."""
        if sequence not in self._sequences:
            return
        self._sequences.remove(sequence)
        self.num_by_tenant[sequence.tenant] -= 1
        if not self.num_by_tenant[sequence.tenant]:
            del self.num_by_tenant[sequence.tenant]
