"""Sizes of the workloads, with two presets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvmosaic.config.setting import setting, validate_settings
from kvmosaic.errors import InvalidConfig


def _size(default: int, high: int, help_text: str) -> Any:
    return setting(default, panel="Sizes", low=1, high=high, help=help_text)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the workloads are; tokens and counts."""

    system: int = _size(64, 100_000, "Tokens of the system prompt.")
    documents: int = _size(8, 1_000, "Documents of one prompt.")
    document_tokens: int = _size(512, 100_000, "Tokens of each document.")
    question: int = _size(32, 100_000, "Tokens of a question.")
    answer: int = _size(16, 100_000, "Tokens of an answer, where answers are measured.")
    plain_tokens: int = _size(1_024, 100_000, "Tokens of a prompt without documents.")
    rounds: int = _size(5, 10_000, "Prompts per workload and engine.")
    zipf_documents: int = _size(5, 1_000, "Documents of one prompt whose documents are drawn by popularity.")
    zipf_prompts: int = _size(12, 100_000, "Prompts per expected reuse of the workload zipf.")
    catalogue: int = _size(200, 100_000, "Documents to draw from.")
    orders: int = _size(500, 1_000_000, "Prompts of the workload orders: known documents in orders not seen before.")
    max_sharers: int = _size(32, 1_024, "Maximum number of prompts that share their documents at once.")

    def __post_init__(self) -> None:
        validate_settings(self)
        if self.zipf_documents > self.catalogue:
            raise InvalidConfig(
                f"a prompt of {self.zipf_documents} documents cannot be drawn from a catalogue of {self.catalogue}; "
                "make the catalogue larger"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer, its documents one after the other."""
        documents = max(self.documents, self.zipf_documents) * self.document_tokens
        talk = NUM_TURNS * (self.question + self.answer)
        return max(self.system + documents + talk, self.plain_tokens) + self.answer

    def within(self, max_positions: int | None) -> Sizes:
        """The same with as many documents as the model has positions for.

        Raises:
            InvalidConfig: not even one document fits.
        """
        sizes = self
        while max_positions is not None and sizes.longest > max_positions:
            most = max(sizes.documents, sizes.zipf_documents)
            if most == 1 or sizes.plain_tokens + sizes.answer > max_positions:
                raise InvalidConfig(
                    f"the prompts take up to {sizes.longest} tokens, this model has {max_positions} positions; "
                    "make the documents shorter (--document-tokens)"
                )
            sizes = replace(
                sizes, documents=min(sizes.documents, most - 1), zipf_documents=min(sizes.zipf_documents, most - 1)
            )
        return sizes


NUM_TURNS = 4
"""Turns of a conversation."""

FULL = Sizes()
QUICK = Sizes(
    documents=4,
    document_tokens=128,
    answer=8,
    plain_tokens=256,
    rounds=3,
    zipf_prompts=6,
    catalogue=100,
    orders=40,
    max_sharers=8,
)
PRESETS = {"quick": QUICK, "full": FULL}
