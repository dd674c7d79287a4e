"""Request outputs, with vLLM's field names; and scores of given continuations."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, NamedTuple

from kvmosaic.sampling.reuse import ReuseReport
from kvmosaic.tools.call import ToolCall

FinishReason = Literal["stop", "length", "abort", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token, before temperature and filters."""

    logprob: float
    rank: int | None = None
    """1 is the most likely token of the vocabulary."""
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer, complete or so far."""

    index: int
    """Index of the answer, below `n`."""
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    """Sum over the sampled tokens; None unless `logprobs` were requested."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """Per token: the sampled and the most likely ones, by token id."""
    finish_reason: FinishReason | None = None
    """stop, length, abort or tool_calls; None while the answer continues."""
    stop_reason: int | str | None = None
    """The stop text or stop id that ended it; None for the end-of-sequence token."""

    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of tools that were passed to `LLM.chat`; `text` is what the model wrote beside them."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete."""
        return self.finish_reason is not None


class Period(NamedTuple):
    """A stretch of time, between two timestamps."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Timestamps of a request: seconds of a monotonic clock."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    plan: Period | None = None
    """Its prompt was placed: layout, window, repair."""
    load: Period | None = None
    """From its first fetch from the tiers until what had arrived was in its blocks."""
    lookup: Period | None = None
    """Its cached tokens were looked up, and its blocks allocated; the first time, if it was preempted or repaired."""

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival until the first step."""
        return _difference(self.first_scheduled_time, self.arrival_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival until the first token."""
        return _difference(self.first_token_time, self.arrival_time)

    @property
    def total_time(self) -> float | None:
        """Seconds from arrival until the last answer ended."""
        return _difference(self.finished_time, self.arrival_time)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of a request: its answers, and the reuse report of its prompt."""

    request_id: str
    prompt: str | None
    """The prompt's text; None if it was given as token ids."""
    prompt_token_ids: tuple[int, ...]
    """All segments, in prompt order."""
    outputs: tuple[CompletionOutput, ...]
    finished: bool = False
    reuse: ReuseReport = field(default_factory=ReuseReport)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were not computed for this request."""
        return self.reuse.reused_tokens


def _difference(end: float | None, start: float) -> float | None:
    return None if end is None else end - start


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
