"""Step: the work of one forward, the tokens and reads it may still take, and how long steps take."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kvmosaic.cache import BlockCopy, Chunk
from kvmosaic.cache.block_table import StateProgress
from kvmosaic.engine.sequence import Sequence
from kvmosaic.engine.shares import Shares
from kvmosaic.engine.swap_space import Restore
from kvmosaic.errors import KVMosaicError

MAX_STEP_LOOKS = 2**18
"""Max rows of a step times the spans that each reads: a query is rotated for each of them, in memory and time."""


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
    states: StateProgress | None = None
    """For models with states."""

    @property
    def completed_chunk(self) -> Chunk | None:
        """The chunk whose last tokens these are, if any; while its sequence holds its blocks."""
        assert self.sequence.allocation is not None
        chunk = self.sequence.allocation.spans[self.span].chunk
        return chunk if chunk is not None and self.first + self.num_tokens == chunk.num_tokens else None


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

    def completed_chunks(self) -> list[tuple[Chunk, float]]:
        """Chunks that the step completes, and the seconds spent on each so far; while their sequences hold them."""
        return [
            (chunk, work.sequence.span_seconds[work.span])
            for work in self.works
            if (chunk := work.completed_chunk) is not None
        ]

    def has(self, sequence: Sequence) -> bool:
        """Whether the step computes anything for a sequence."""
        return any(work.sequence is sequence for work in self.works)

    def defers(self, sequence: Sequence) -> bool:
        """Whether a sequence is a warm-up, and the step, longer by its tokens, would delay a request before it."""
        if not sequence.request.is_warm_up:
            return False
        others = (work.sequence for work in self.works if not work.sequence.request.is_warm_up)
        return any(other.sort_key < sequence.sort_key for other in others)

    @property
    def num_scored(self) -> int:
        """Rows of given continuations whose logits are needed."""
        return sum(work.num_logits for work in self.works if work.sequence.request.scoring is not None)

    @property
    def num_tokens(self) -> int:
        """Rows of the forward."""
        return sum(work.num_tokens for work in self.works)


class StepBudget:
    """Remaining tokens and looks (rows times spans read) of a step.

    First every tenant that wants some may take its share; then, after `lift`, the rest is first come, first served.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        """Remaining tokens of the step."""
        self.num_looks = MAX_STEP_LOOKS
        self._tokens: dict[str, int] | None = None
        self._looks: dict[str, int] = {}

    @property
    def is_spent(self) -> bool:
        """Whether no tenant can be given anything."""
        return self.num_tokens <= 0 or self.num_looks <= 0

    def keep_looks(self) -> None:
        """Reserves at least half of the looks for prompts, however many documents the running answers read."""
        self.num_looks = max(self.num_looks, MAX_STEP_LOOKS // 2)

    def share(self, tenants: Collection[str], shares: Shares) -> None:
        """Divides the rest between tenants; others get nothing before `lift`."""
        self._tokens = shares.divided(self.num_tokens, tenants)
        self._looks = shares.divided(self.num_looks, tenants)

    def lift(self) -> None:
        """Makes the rest available to all tenants."""
        self._tokens = None

    def tokens_of(self, tenant: str) -> int:
        """Tokens that a tenant may take now."""
        return max(self.num_tokens if self._tokens is None else min(self.num_tokens, self._tokens.get(tenant, 0)), 0)

    def looks_of(self, tenant: str) -> int:
        """Looks that a tenant may take now."""
        return max(self.num_looks if self._tokens is None else min(self.num_looks, self._looks.get(tenant, 0)), 0)

    def spend(self, tenant: str, num_tokens: int, num_looks: int) -> None:
        """Charges a tenant."""
        self.num_tokens -= num_tokens
        self.num_looks -= num_looks
        if self._tokens is not None:
            self._tokens[tenant] = self._tokens.get(tenant, 0) - num_tokens
            self._looks[tenant] = self._looks.get(tenant, 0) - num_looks


SHARED_STEP_SECONDS = 0.015
"""Target time of a step while there is more than one tenant."""
WARM_STEP_SECONDS = 0.5
"""Most of a step with nothing but warm-ups, for which a request that comes may have to wait."""
SMALL_STEP = 4
"""Tokens of a step that takes hardly longer than an empty one."""
LEAST_ANSWERS = 8
"""Answers for which a step always has a token each."""
LEAST_TOKENS = 128
"""Tokens that a step may always have."""


class StepTimes:
    """Moving averages: seconds of a step with hardly any tokens, and of each token or answer more."""

    def __init__(self) -> None:
        self._least: float | None = None
        self._token: float | None = None
        """In steps of many tokens."""
        self._answer: float | None = None
        """In steps of many answers and nothing else."""

    def note(self, num_tokens: int, num_works: int, seconds: float) -> None:
        """Records the duration of a step."""
        if num_tokens <= SMALL_STEP:
            self._least = 0.8 * (self._least or seconds) + 0.2 * seconds
        elif num_tokens == num_works >= LEAST_ANSWERS and self._least is not None:
            each = max(seconds - self._least, 0.0) / num_tokens
            self._answer = each if self._answer is None else 0.8 * self._answer + 0.2 * each
        if num_tokens >= LEAST_TOKENS // 2:
            each = max(seconds - (self._least or 0.0), 0.0) / num_tokens
            self._token = each if self._token is None else 0.8 * self._token + 0.2 * each

    def are_longer(self, num_answers: int) -> bool:
        """Whether `num_answers` make a step longer by a quarter or more.

        With a large model they do not, because reading the weights dominates: leaving answers out gains nothing.
        """
        if self._least is None or self._answer is None:
            return False
        return num_answers * self._answer > self._least / 4

    def max_answers(self) -> int | None:
        """Answers of a step of about `SHARED_STEP_SECONDS`; None if even an empty one takes as long."""
        assert self._answer is not None and self._least is not None
        room = SHARED_STEP_SECONDS - self._least
        return max(LEAST_ANSWERS, int(room / self._answer)) if room > 0 else None

    def max_tokens(self, most: int, seconds: float = SHARED_STEP_SECONDS) -> int:
        """Tokens of a step that others wait for, at most `most`.

        It takes about `seconds`, or twice as long as an empty one: shorter ones would cost too much.
        """
        if not self._token:
            return min(most, 4 * LEAST_TOKENS)
        least = self._least or 0.0
        return min(most, max(LEAST_TOKENS, int(max(seconds - least, least) / self._token)))
