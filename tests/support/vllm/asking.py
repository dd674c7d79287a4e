"""What tests ask a vLLM engine, and what it answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any

from kvmosaic.vllm.contract import FIELD, Composition
from support.vllm.models import MAX_TOKEN_ID


@dataclass(frozen=True)
class Ask:
    """A prompt of token ids, how it is composed, and how it is answered: greedily unless told otherwise."""

    token_ids: tuple[int, ...]
    composition: Composition | None = None
    max_tokens: int = 4
    logprobs: int | None = 8
    n: int = 1
    temperature: float = 0.0
    seed: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    repetition_penalty: float = 1.0

    def to_json(self, **fields: Any) -> dict[str, Any]:
        """As `inside.answer` reads it."""
        ask = replace(self, **fields)
        said = asdict(ask)
        del said["composition"]
        return {**said, "kv_transfer_params": ask.composition and ask.composition.to_params()}

    @property
    def plain(self) -> Ask:
        """The same tokens as an ordinary prompt."""
        return replace(self, composition=None)

    @property
    def question(self) -> int:
        """Tokens of the question; all of them of an ordinary prompt."""
        return len(self.token_ids) - (self.composition.end if self.composition else 0)


@dataclass(frozen=True)
class Answer:
    """What came back: per answer its tokens, and per token the log-probabilities of it and of the most likely ones."""

    token_ids: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    num_cached_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: list[Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        named = [[{int(token): value for token, value in step.items()} for step in answer] for answer in self.logprobs]
        object.__setattr__(self, "logprobs", named)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the first answer."""
        return self.token_ids[0]

    @property
    def report(self) -> dict[str, Any]:
        """The reuse report."""
        assert self.kv_transfer_params is not None, "no report came back"
        report: dict[str, Any] = self.kv_transfer_params[FIELD]
        return report

    @property
    def is_composed(self) -> bool:
        """Whether documents were put together, and not bypassed."""
        return not self.report["bypass"]


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of two log-probabilities of one token, as long as the answers are the same.

    Answers of random models may part at a near tie. The step at which they part still has the same past, so it counts.
    """
    assert len(one.logprobs) == len(other.logprobs)
    largest = 0.0
    for a, b, tokens_a, tokens_b in zip(one.logprobs, other.logprobs, one.token_ids, other.token_ids, strict=True):
        for step_a, step_b, token_a, token_b in zip(a, b, tokens_a, tokens_b, strict=True):
            both = step_a.keys() & step_b.keys()
            assert both, "the most likely tokens have nothing in common"
            largest = max([largest, *(abs(step_a[token] - step_b[token]) for token in both)])
            if token_a != token_b:
                break
    return largest


def documents(seed: int, *lengths: int) -> list[list[int]]:
    """Random documents of these lengths; the same ones for the same seed."""
    draw = random.Random(seed)
    return [[draw.randrange(5, MAX_TOKEN_ID) for _ in range(length)] for length in lengths]


def compose(
    system: Sequence[int],
    chunks: Sequence[Sequence[int]],
    question: Sequence[int],
    texts: Sequence[Sequence[int]] = (),
    **how: Any,
) -> Ask:
    """A composed prompt; `how` are fields of `Composition`, `texts` stand before the chunks."""
    body = [run for text, chunk in zip_longest(texts, chunks, fillvalue=()) for run in (text, chunk)]
    token_ids = (*system, *chain.from_iterable(body), *question)
    lengths = tuple(map(len, texts))
    return Ask(token_ids, Composition(len(system), tuple(map(len, chunks)), texts=lengths, **how))
