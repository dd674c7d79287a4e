"""A peer: one engine under measurement, and what it tells about a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmosaic.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Reading:
    """What one request took."""

    first_seconds: float
    """From the moment its batch was handed over to its first token."""
    token_seconds: float | None
    """Mean time per token after the first one; None for answers of one token."""
    num_prompt: int
    num_answer: int
    num_computed: int | None
    """Prompt tokens that went through the model; None where the engine does not tell."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one batch took."""

    seconds: float
    """From handing it over to its last token."""
    readings: tuple[Reading, ...]
    kv_bytes: int | None = None
    """Keys and values that the engine holds right after, those that it keeps for later included; None: unknown."""


class Peer(Protocol):
    """One engine with one model in one dtype."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def dtype(self) -> str:
        """The number format it computes in."""

    @property
    def is_ours(self) -> bool:
        """Whether it is our own engine with its chunk cache."""

    @property
    def process_id(self) -> int:
        """The process that it runs in."""

    def reset(self) -> None:
        """Forgets everything that it kept of earlier prompts."""

    def answer(self, prompts: Sequence[Prompt], num_answer: int) -> Batch:
        """Answers prompts, all at once, greedily, with exactly `num_answer` tokens each."""

    def close(self) -> None:
        """Ends it; calling it again is safe."""


def joined_ids(prompt: Prompt) -> list[int]:
    """All tokens of a prompt, as an ordinary engine reads them."""
    return [token for segment in prompt.segments for token in segment.token_ids or ()]
