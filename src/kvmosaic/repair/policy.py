"""Repair policies: which tokens of cached chunks a request computes again, now that it knows what stands before them.

A chunk was computed without the chunks before it. Computing all of its tokens again, in their places, gives ordinary
causal reading; computing a few of them gives most of it back for a few percent of the time. A policy says which few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

from kvmosaic.errors import InvalidRepair
from kvmosaic.repair.choosing import most_of

Signal = Literal["deviation", "attention"]

_DEVIATION_PART = 0.5
MAX_FIRST_TOKENS = 2**20
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
MIN_SCALE, MAX_SCALE = 1e-6, 1e6


@dataclass(frozen=True, slots=True)
class ChunkSignals:
    """What a policy knows of one chunk of a prompt.

    A chunk that is exact saw all that stands before it: nothing of it needs to be computed again.
    """

    num_tokens: int
    is_exact: bool = False
    deviation: Sequence[float] = ()
    """By token: how far the keys of the second layer are from what they are when the token sees everything before it,
    as a squared distance. Empty unless asked for."""
    attention: Sequence[float] = ()
    """By token: how much the question looks at it, as a share of attention summed over the question's tokens, averaged
    over heads and the later half of the layers. Empty unless asked for."""

    @property
    def num_open(self) -> int:
        """Tokens that may be chosen."""
        return 0 if self.is_exact else self.num_tokens


@runtime_checkable
class RepairPolicy(Protocol):
    """What every policy says; `kvmosaic.repair` has seven, and anything with these members will do."""

    @property
    def signals(self) -> frozenset[Signal]:
        """What must be measured before it can choose; measuring costs time."""

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """For every chunk of a prompt, in order: the numbers of its tokens to compute again, each once."""


@dataclass(frozen=True, slots=True)
class NoRepair:
    """Nothing is computed again: documents do not see each other."""

    signals: ClassVar[frozenset[Signal]] = frozenset()

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return [() for _ in chunks]

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, slots=True)
class FullRepair:
    """Everything is computed again, as ordinary causal reading of the whole prompt; nothing of the chunks is read."""

    signals: ClassVar[frozenset[Signal]] = frozenset()

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return [range(chunk.num_open) for chunk in chunks]

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first tokens of every chunk, where each chunk has grown an attention sink of its own (EPIC, LegoLink)."""

    tokens: int = 16
    signals: ClassVar[frozenset[Signal]] = frozenset()

    def __post_init__(self) -> None:
        if (
            isinstance(self.tokens, bool)
            or not isinstance(self.tokens, int)
            or not 1 <= self.tokens <= MAX_FIRST_TOKENS
        ):
            raise InvalidRepair(f"first(k) computes 1 to {MAX_FIRST_TOKENS} tokens of each chunk, got {self.tokens!r}")

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return [range(min(self.tokens, chunk.num_open)) for chunk in chunks]

    def __str__(self) -> str:
        return f"first({self.tokens})"


@dataclass(frozen=True, slots=True)
class KeyDeviation:
    """The tokens whose keys are furthest from what they would be if they saw everything before them (CacheBlend)."""

    fraction: float = 0.15
    signals: ClassVar[frozenset[Signal]] = frozenset({"deviation"})

    def __post_init__(self) -> None:
        _check_fraction("deviation", self.fraction)

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return most_of(chunks, [chunk.deviation for chunk in chunks], self.fraction)

    def __str__(self) -> str:
        return f"deviation({_text(self.fraction)})"


@dataclass(frozen=True, slots=True)
class QueryAttention:
    """The tokens that the question looks at most (ProphetKV)."""

    fraction: float = 0.15
    signals: ClassVar[frozenset[Signal]] = frozenset({"attention"})

    def __post_init__(self) -> None:
        _check_fraction("query", self.fraction)

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return most_of(chunks, [chunk.attention for chunk in chunks], self.fraction)

    def __str__(self) -> str:
        return f"query({_text(self.fraction)})"


@dataclass(frozen=True, slots=True)
class Combined:
    """The tokens that the question looks at, and those whose keys are wrong (both signals, as in QCFuse).

    A token's score is the root of its share of all attention, plus half the root of its share of all deviation. One
    finds what the question asks for, the other what must be read again for it. (Products, and sums without
    roots, were worse: few tokens have nearly all of either signal.)
    """

    fraction: float = 0.15
    signals: ClassVar[frozenset[Signal]] = frozenset({"deviation", "attention"})

    def __post_init__(self) -> None:
        _check_fraction("combined", self.fraction)

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        asked_in_all = sum(sum(chunk.attention) for chunk in chunks) or 1.0
        far_in_all = sum(sum(chunk.deviation) for chunk in chunks) or 1.0
        scores = [
            [
                math.sqrt(asked / asked_in_all) + _DEVIATION_PART * math.sqrt(far / far_in_all)
                for asked, far in zip(chunk.attention, chunk.deviation, strict=True)
            ]
            for chunk in chunks
        ]
        return most_of(chunks, scores, self.fraction)

    def __str__(self) -> str:
        return f"combined({_text(self.fraction)})"


@dataclass(frozen=True, slots=True)
class Temperature:
    """Nothing is computed again; question and answer look at the chunks more sharply, and weigh them differently (APE).

    Scores of chunk keys are divided by `temperature`, and what they add up to in the softmax is multiplied by `scale`.
    """

    temperature: float = 1.0
    scale: float = 1.0
    signals: ClassVar[frozenset[Signal]] = frozenset()

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("t", self.temperature, MIN_TEMPERATURE, MAX_TEMPERATURE),
            ("scale", self.scale, MIN_SCALE, MAX_SCALE),
        ):
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise InvalidRepair(
                    f"temperature(t, scale) has {name}={value!r}; use a number from {least:g} to {most:g} "
                    "(1 changes nothing)"
                )

    def choose(self, chunks: Sequence[ChunkSignals]) -> list[Sequence[int]]:
        """See `RepairPolicy.choose`."""
        return [() for _ in chunks]

    def __str__(self) -> str:
        return f"temperature({_text(self.temperature)}, {_text(self.scale)})"


def _text(number: float) -> str:
    """The shortest text that is read back as this number."""
    return repr(float(number)).removesuffix(".0")


def _check_fraction(name: str, fraction: object) -> None:
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise InvalidRepair(
            f"{name}(fraction) computes this share of the chunks' tokens: above 0, at most 1, got {fraction!r}"
        )
