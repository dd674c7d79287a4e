"""A workload: prompts of token ids from a seed, and the source of its tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvmosaic.bench.sizes import Sizes
from kvmosaic.prompt import Prompt

Tokens = tuple[int, ...]
_FIRST_ORDINARY = 16
"""Tokens below are often special ones, such as the end of a text."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that every engine runs, in the same order."""

    name: str
    about: str
    """What is asked, in one line."""
    batches: tuple[tuple[Prompt, ...], ...]
    """Measured prompts; the prompts of a batch run at once."""
    warm: tuple[Prompt, ...] = ()
    """Prompts that run before, unmeasured."""
    num_answer: int = 1
    """Tokens of every answer."""
    figure: str = ""
    """The plot it belongs to: documents, hit rate, sharers or orders."""
    x: float = 0.0
    """Its place on that plot."""
    is_ours_only: bool = False
    """Whether it runs only on our own engine with its chunk cache."""


class TokenSource:
    """Token ids from a seed. Two sources with different names have nothing in common."""

    def __init__(self, seed: int, name: str, vocab_size: int, sizes: Sizes) -> None:
        self.random = random.Random(f"{seed} {name}")  # noqa: S311  (nothing secret)
        self.sizes = sizes
        self._first = min(_FIRST_ORDINARY, vocab_size - 1)
        self._vocab_size = vocab_size

    def tokens(self, count: int) -> Tokens:
        """`count` random tokens."""
        return tuple(self.random.randrange(self._first, self._vocab_size) for _ in range(count))

    def system(self) -> Tokens:
        """A system prompt."""
        return self.tokens(self.sizes.system)

    def question(self) -> Tokens:
        """A question."""
        return self.tokens(self.sizes.question)

    def documents(self, count: int | None = None) -> list[Tokens]:
        """New documents; as many as a prompt has, unless told."""
        count = self.sizes.documents if count is None else count
        return [self.tokens(self.sizes.document_tokens) for _ in range(count)]

    def shuffled(self, documents: list[Tokens]) -> list[Tokens]:
        """The same documents in another order (with one document, the same)."""
        order = documents
        while order == documents and len(documents) > 1:
            order = self.random.sample(documents, len(documents))
        return order
