"""Demand on a device: number and length of documents, and the prompts that run at once."""

from __future__ import annotations

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
    have the same length.
    """

    documents: int
    tokens_per_document: int
    concurrency: int = 1
    """Prompts that run at once."""
    documents_per_prompt: int = 5
    system_tokens: int = 256
    question_tokens: int = 64
    answer_tokens: int = 256

    def __post_init__(self) -> None:
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InvalidConfig(f"{name} must be a whole number between {low:,} and {high:,}, got {value!r}")
        if self.documents_per_prompt > self.documents:
            raise InvalidConfig(
                f"a prompt of {self.documents_per_prompt} different documents cannot be drawn from {self.documents}; "
                "lower documents_per_prompt"
            )
