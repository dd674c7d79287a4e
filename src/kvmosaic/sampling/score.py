"""Score output: the likelihood of a given continuation under the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean

from kvmosaic.sampling.reuse import ReuseReport


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The tokens of a continuation, and the model's predictions for each of them, in order."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log probability of each token, in nats, before temperature and filters."""
    greedy_token_ids: tuple[int, ...]
    """The most likely token at each position."""
    reuse: ReuseReport = field(default_factory=ReuseReport)

    @property
    def loss(self) -> float:
        """Mean negative log likelihood in nats per token: 0 is certainty."""
        return -fmean(self.logprobs)

    @property
    def agreement(self) -> float:
        """The share of tokens that are the model's most likely ones, from 0 to 1."""
        pairs = zip(self.token_ids, self.greedy_token_ids, strict=True)
        return fmean(float(token == greedy) for token, greedy in pairs)
