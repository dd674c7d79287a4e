"""Stopping: when an answer ends, and how much of its text is final before."""

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
    """The text of an answer, and the search for stop texts in it.

        text     [ taken | shown | held: may be the beginning of a stop text ]

    A stop text may span several pieces of text. The first complete one ends the answer, and of several
    complete at once the longest, so the result does not depend on where the pieces are cut. Each character is processed
    once for each stop text, whatever they look like (Knuth, Morris and Pratt).
    """

    def __init__(self, stops: Collection[str], *, keep: bool = False) -> None:
        """Searches for `stops`; `keep` includes the found one in the text."""
        self._stops = [_Stop(stop) for stop in stops]
        self._keep = keep
        self._parts: list[str] = []
        self._num_taken_parts = 0
        self.num_characters = 0

    @property
    def text(self) -> str:
        """All text so far; a found stop text and what follows it are cut off."""
        return "".join(self._parts)

    def append(self, new: str, *, search: bool = True) -> str | None:
        """Adds text and returns the stop text that it completes."""
        if not new:
            return None
        start_of_new = self.num_characters
        self._parts.append(new)
        self.num_characters += len(new)
        ends = [
            (end, -len(stop.text), stop.text) for stop in self._stops if (end := stop.read(new, search)) is not None
        ]
        if not ends:
            return None
        end, length, found = min(ends)
        self._cut(start_of_new + (end if self._keep else end + length))
        return found

    @property
    def num_shown(self) -> int:
        """Length of the final text, which cannot become part of a stop text."""
        if self._keep:
            return self.num_characters
        return self.num_characters - max((stop.num_matched for stop in self._stops), default=0)

    def take(self, *, everything: bool = False) -> str:
        """Final text that was not taken before; all text once the answer has ended."""
        untaken = "".join(self._parts[self._num_taken_parts :])
        held = 0 if everything else self.num_characters - self.num_shown
        ready = untaken[: len(untaken) - held]
        self._parts[self._num_taken_parts :] = [ready, untaken[len(ready) :]]
        self._num_taken_parts += 1
        return ready

    def _cut(self, num_characters: int) -> None:
        """Truncates the text; taken text is never part of a stop text and stays."""
        taken = "".join(self._parts[: self._num_taken_parts])
        untaken = "".join(self._parts[self._num_taken_parts :])
        self._parts = [taken, untaken[: num_characters - len(taken)]]
        self._num_taken_parts = 1
        self.num_characters = num_characters
        for stop in self._stops:
            stop.num_matched = 0


class _Stop:
    """One stop text, and the length of its match at the end of the text so far."""

    __slots__ = ("_borders", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        """Length of the longest prefix of the stop text that the text so far ends with."""
        self._borders = [0, 0]
        """By prefix length: the longest proper border. Computed as far as needed."""

    def read(self, new: str, search: bool) -> int | None:
        """Reads more text; returns where the stop text is first complete, if it is searched for."""
        text, matched, number = self.text, self.num_matched, 0
        while number < len(new):
            if not matched:
                number = new.find(text[0], number)
                if number < 0:
                    break
            character = new[number]
            while matched and text[matched] != character:
                matched = self._border(matched)
            matched += text[matched] == character
            number += 1
            if matched == len(text):
                if search:
                    return number
                matched = self._border(matched)
        self.num_matched = matched
        return None

    def _border(self, length: int) -> int:
        text, borders = self.text, self._borders
        while len(borders) <= length:
            border = borders[-1]
            while border and text[border] != text[len(borders) - 1]:
                border = borders[border]
            borders.append(border + (text[border] == text[len(borders) - 1]))
        return borders[length]


class StopRules:
    """Decides after each token whether the answer ends; `StopStrings` searches the text."""

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int] = (), max_tokens: int | None = None
    ) -> None:
        """Stores the rules of one answer.

        Args:
            params: the sampling parameters.
            eos_token_ids: the model's end-of-sequence tokens.
            max_tokens: the engine's limit; the smaller of this and `params.max_tokens` counts.
        """
        limits = [limit for limit in (params.max_tokens, max_tokens) if limit is not None]
        self.max_tokens = min(limits) if limits else None
        self.min_tokens = params.min_tokens
        self.all_eos_token_ids = frozenset(eos_token_ids)
        self.eos_token_ids = frozenset() if params.ignore_eos else self.all_eos_token_ids
        self.stop_token_ids = params.stop_ids

    @property
    def ending_ids(self) -> frozenset[int]:
        """Token ids that end the answer; they are not sampled before `min_tokens`."""
        return self.eos_token_ids | self.stop_token_ids

    def by_id(self, token_id: int, num_tokens: int) -> Finish | None:
        """Whether this token, the `num_tokens`-th of the answer, ends it by its id."""
        if num_tokens <= self.min_tokens:
            return None
        if token_id in self.eos_token_ids:
            return Finish("stop")
        return Finish("stop", token_id) if token_id in self.stop_token_ids else None

    def by_length(self, num_tokens: int) -> Finish | None:
        """Whether an answer of `num_tokens` tokens has reached its limit."""
        return Finish("length") if self.max_tokens is not None and num_tokens >= self.max_tokens else None
