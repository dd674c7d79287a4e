"""Demand on a device: number and length of documents, concurrency, popularity."""

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

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt, without its answer."""
        return self.system_tokens + self.documents_per_prompt * self.tokens_per_document + self.question_tokens
