"""Peer protocol: one engine under measurement, and its readings of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvmosaic.prompt import Prompt

OWN, OFF = "kvmosaic", "kvmosaic, chunk cache off"


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Measurements of one request."""

    first_seconds: float
    """Seconds from the submission of its batch to its first token."""
    token_seconds: float | None
    """Mean time per token after the first one; None for answers of one token."""
    num_prompt: int
    num_answer: int
    num_computed: int | None
    """Prompt tokens that went through the model; None if the engine does not report it."""


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Measurements of one batch."""

    seconds: float
    """Seconds from submission to its last token."""
    readings: tuple[RequestTimes, ...]
    kv_bytes: int | None = None
    """KV cache bytes that the engine holds right after, cached ones included; None: unknown."""


class Peer(Protocol):
    """One engine with one model in one dtype."""

    @property
    def name(self) -> str:
        """Its name in tables."""

    @property
    def dtype(self) -> str:
        """The number format it computes in."""

    @property
    def is_ours(self) -> bool:
        """Whether it is our own engine with its chunk cache."""

    @property
    def process_id(self) -> int:
        """The process it runs in."""

    def reset(self) -> None:
        """Drops the KV cache of earlier prompts."""

    def answer(self, prompts: Sequence[Prompt], num_answer: int) -> BatchTimes:
        """Answers prompts, all at once, greedily, with exactly `num_answer` tokens each."""

    def close(self) -> None:
        """Shuts the engine down; calling it again is safe."""


def joined_ids(prompt: Prompt) -> list[int]:
    """All tokens of a prompt, as an ordinary engine reads them."""
    return [token for segment in prompt.segments for token in segment.token_ids or ()]
