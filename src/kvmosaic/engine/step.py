"""Step: the work of one forward, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmosaic.cache import BlockCopy
from kvmosaic.engine.sequence import Sequence
from kvmosaic.engine.swap_space import Restore
from kvmosaic.errors import KVMosaicError


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """Consecutive tokens of one span of one sequence."""

    sequence: Sequence
    span: int
    first: int
    """Number of the first token inside the span."""
    num_tokens: int
    num_logits: int = 0
    """Number of tokens at the end that need logits."""


@dataclass(slots=True)
class Step:
    """The work of one forward, and the requests that cannot run at all."""

    works: list[ScheduledTokens] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    """Swapped-out blocks to be written back after the copies."""
    failed: list[tuple[Sequence, KVMosaicError]] = field(default_factory=list)
    ended: list[Sequence] = field(default_factory=list)
    """Sequences that must end because they run alone and have no room to grow."""
    num_looks: int = 0
    """Rows times the spans that each of them reads."""

    def has(self, sequence: Sequence) -> bool:
        """Whether the step computes anything for a sequence."""
        return any(work.sequence is sequence for work in self.works)

    @property
    def num_scored(self) -> int:
        """Rows of given continuations whose logits are needed."""
        return sum(work.num_logits for work in self.works if work.sequence.request.scoring is not None)

    @property
    def num_tokens(self) -> int:
        """Rows of the forward."""
        return sum(work.num_tokens for work in self.works)
