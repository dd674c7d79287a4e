"""Demand on a device: number and length of documents, concurrency, and the hit rate that their popularity gives.

An LRU cache of C documents keeps a document about as long as it takes until C others were requested. Che's
approximation takes this time T to be the same for all of them:

    C = sum_r 1 - exp(-p_r T)          hit rate = sum_r p_r (1 - exp(-p_r T))

(Che, Tung and Wang 2002; why it is so good: Fricker, Robert and Roberts 2012.) It assumes that requests are drawn
independently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvmosaic.errors import InvalidConfig

_LIMITS = {
    "documents": (1, 10**9),
    "tokens_per_document": (1, 10**7),
    "concurrency": (1, 65_536),
    "documents_per_prompt": (1, 4_096),
    "system_tokens": (0, 10**7),
    "question_tokens": (1, 10**7),
    "answer_tokens": (0, 10**7),
}


@dataclass(frozen=True, slots=True)
class Demand:
    """Documents that prompts draw from, and the prompts that run at once.

    A prompt is the system text, `documents_per_prompt` different documents, a question and its answer. All documents
    have the same length. The document of rank r is drawn with a probability proportional to 1 / r ** zipf.
    """

    documents: int
    tokens_per_document: int
    concurrency: int = 1
    """Prompts that run at once."""
    documents_per_prompt: int = 5
    system_tokens: int = 256
    question_tokens: int = 64
    answer_tokens: int = 256
    zipf: float = 1.0
    """Exponent of the popularity: 0 is all alike, 1 is usual, 2 is a few documents for nearly all prompts."""

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidConfig(f"{name} must be a whole number between {low:,} and {high:,}, got {value!r}")
        if isinstance(self.zipf, bool) or not isinstance(self.zipf, int | float) or not 0 <= self.zipf <= 4:
            raise InvalidConfig(f"zipf must be a number between 0 and 4, got {self.zipf!r}")
        if self.documents_per_prompt > self.documents:
            raise InvalidConfig(
                f"a prompt of {self.documents_per_prompt} different documents cannot be drawn from {self.documents}; "
                "lower documents_per_prompt"
            )


_EXACT = 1_000
"""Ranks counted one by one; further ones are in groups whose ranks differ by 1%."""
_GROWTH = 1.01
_STEPS = 100
_ADDED = 0.75
_LONGEST = 1e300


@dataclass(frozen=True, slots=True)
class Ranks:
    """Documents of about the same popularity."""

    count: float
    probability: float
    """Of each of them."""


def zipf_ranks(count: int, exponent: float) -> list[Ranks]:
    """The popularity of `count` documents, 1 / rank ** exponent, from the first to the last; probabilities sum to 1."""
    groups: list[tuple[float, float]] = [(1.0, rank**-exponent) for rank in range(1, min(count, _EXACT) + 1)]
    first = _EXACT + 1
    while first <= count:
        last = min(count, int(first * _GROWTH))
        groups.append((last - first + 1.0, _mean_weight(first - 0.5, last + 0.5, exponent)))
        first = last + 1
    total = math.fsum(number * weight for number, weight in groups)
    return [Ranks(number, weight / total) for number, weight in groups]


def hit_rate(ranks: Sequence[Ranks], kept: float) -> float:
    """Returns the long-run hit rate of an LRU cache of `kept` documents (Che)."""
    total = sum(group.count for group in ranks)
    if kept >= total:
        return 1.0
    if kept <= 0:
        return 0.0
    time = _time_until(ranks, kept)
    return math.fsum(group.count * group.probability * -math.expm1(-group.probability * time) for group in ranks)


def drawn_together(ranks: Sequence[Ranks], number: int) -> list[Ranks]:
    """Popularity when a prompt draws `number` different documents: what was drawn before is drawn again.

    The most popular ones lose, because no prompt asks for them twice. Of successive draws by weights p, a document is
    among the first `number` with a probability of about 1 - exp(-p T), with T such that these sum to `number` (Rosén
    1972).
    """
    total = sum(group.count for group in ranks)
    if number <= 1:
        return list(ranks)
    if number >= total:
        return [Ranks(group.count, 1.0 / total) for group in ranks]
    time = _time_until(ranks, number)
    return [Ranks(group.count, -math.expm1(-group.probability * time) / number) for group in ranks]


def with_host(on_device: float, in_host: float) -> float:
    """Different documents on a device and in a host tier, which receives what the device evicts.

    What is fetched from the host tier stays there for a while, so some are in both: between none and all of the smaller
    of the two. A quarter of it is closest to caches that were run.
    """
    return max(on_device, in_host) + _ADDED * min(on_device, in_host)


def best_hit_rate(ranks: Sequence[Ranks], kept: float) -> float:
    """Returns the hit rate if the cache always held the most popular documents: no policy can do better."""
    rate = 0.0
    for group in ranks:
        number = min(group.count, kept)
        rate += number * group.probability
        kept -= number
        if kept <= 0:
            break
    return min(rate, 1.0)


def _time_until(ranks: Sequence[Ranks], kept: float) -> float:
    """Draws after which so many different documents were drawn, on average."""
    low, high = 0.0, 1.0
    while _occupied(ranks, high) < kept and high < _LONGEST:
        high *= 4.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _occupied(ranks, middle) < kept else (low, middle)
    return low


def _occupied(ranks: Sequence[Ranks], time: float) -> float:
    return sum(group.count * -math.expm1(-group.probability * time) for group in ranks)


def _mean_weight(low: float, high: float, exponent: float) -> float:
    """Mean of x ** -exponent from low to high."""
    if abs(exponent - 1.0) < 1e-9:
        return math.log(high / low) / (high - low)
    power = 1.0 - exponent
    return float((high**power - low**power) / power / (high - low))
