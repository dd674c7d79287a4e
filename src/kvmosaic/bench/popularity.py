"""Popularity of documents: a few get most of the requests (Zipf)."""

from __future__ import annotations

import bisect
import random
from itertools import accumulate

POPULAR_SHARE, THEIR_REQUESTS = 0.03, 0.60
"""This share of the documents takes that share of the requests."""


def zipf_weights(count: int) -> list[float]:
    """Weights 1 / rank ** s that sum to 1, with s such that 3% of the documents (at least one) take 60%."""
    popular = max(1, round(POPULAR_SHARE * count))
    low, high = 0.0, 16.0
    for _ in range(60):
        exponent = (low + high) / 2
        weights = [rank**-exponent for rank in range(1, count + 1)]
        if sum(weights[:popular]) < THEIR_REQUESTS * sum(weights):
            low = exponent
        else:
            high = exponent
    total = sum(weights)
    return [weight / total for weight in weights]


def draw(weights: list[float], count: int, source: random.Random) -> list[int]:
    """`count` different ranks (from 0); each draw goes by the weights, and one that came before is drawn again."""
    bounds = list(accumulate(weights))
    chosen: dict[int, None] = {}
    while len(chosen) < count:
        rank = bisect.bisect(bounds, source.random() * bounds[-1])
        chosen.setdefault(min(rank, len(weights) - 1))
    return list(chosen)
