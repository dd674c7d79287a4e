"""Stopping: when an answer ends, and which of its text may be shown before."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvmosaic.sampling.output import FinishReason
from kvmosaic.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an answer ended."""

    reason: FinishReason
    stop_reason: int | str | None = None
    """The stop text or stop id; None for the end-of-sequence token, the length and an abort."""


class StopStrings:
    """Finds stop texts in text that comes in pieces.

        text     [ shown | held: may be the beginning of a stop text ]

    A stop text may straddle several pieces. The one that is complete first ends the text, so the result does not depend
    on where the pieces are cut.
    """

    def __init__(self, stops: Collection[str], *, keep: bool = False) -> None:
        """Looks for `stops`; `keep` leaves the found one in the text."""
        self._stops = tuple(stops)
        self._keep = keep
        self._longest = max(map(len, self._stops), default=0)
        self.text = ""
        """All text so far, without a found stop text (unless kept)."""

    def append(self, new: str, *, search: bool = True) -> str | None:
        """Adds text and returns the stop text that it completes; a found one is cut off together with what follows."""
        before = len(self.text)
        self.text += new
        if not new or not search:
            return None
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self.text.find(stop, max(0, before + 1 - len(stop)))
            if start >= 0:
                match = (start + len(stop), start, stop)
                found = match if found is None else min(found, match)
        if found is None:
            return None
        end, start, stop = found
        self.text = self.text[: end if self._keep else start]
        return stop

    @property
    def num_shown(self) -> int:
        """Characters that no later text can turn into a part of a stop text."""
        if self._keep or not self._stops:
            return len(self.text)
        for length in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-length:]
            if any(stop.startswith(tail) for stop in self._stops if len(stop) > length):
                return len(self.text) - length
        return len(self.text)


class StopRules:
    """Decides after each token whether the answer ends; text is looked at by `StopStrings`."""

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int] = (), max_tokens: int | None = None
    ) -> None:
        """Takes the rules of one answer.

        Args:
            params: the sampling parameters.
            eos_token_ids: the model's end-of-sequence tokens.
            max_tokens: what the model has room for; the smaller of this and `params.max_tokens` counts.
        """
        limits = [limit for limit in (params.max_tokens, max_tokens) if limit is not None]
        self.max_tokens = min(limits) if limits else None
        self.min_tokens = params.min_tokens
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.stop_token_ids = params.stop_ids

    @property
    def ending_ids(self) -> frozenset[int]:
        """Token ids that end the answer; they are not drawn before `min_tokens`."""
        return self.eos_token_ids | self.stop_token_ids

    def by_id(self, token_id: int, num_tokens: int) -> Finish | None:
        """Whether this token, the `num_tokens`-th of the answer, ends it by its id."""
        if num_tokens <= self.min_tokens:
            return None
        if token_id in self.eos_token_ids:
            return Finish("stop")
        return Finish("stop", token_id) if token_id in self.stop_token_ids else None

    def by_length(self, num_tokens: int) -> Finish | None:
        """Whether an answer of `num_tokens` tokens is as long as allowed."""
        return Finish("length") if self.max_tokens is not None and num_tokens >= self.max_tokens else None
