"""Scoring: likelihood of a given continuation under the model, in one forward (teacher forcing).

    prompt … question | c1 c2 c3 c4
                    ^   ^  ^  ^         the logits of these rows are needed; c4 itself is not computed

Documents and repaired tokens are those of an ordinary request for the same prompt: a policy that measures the
question's attention measures the question alone, before the continuation is appended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from array_api_compat import device

from kvmosaic.errors import InvalidPrompt
from kvmosaic.layout import Layout
from kvmosaic.sampling import Array, SampledToken, ScoreOutput, log_softmax, namespace, with_likelihood

MAX_LOGIT_ROWS = 64
"""Max rows of continuations whose logits one step computes: a vocabulary of 262,144 tokens takes 1 MiB for each."""


@dataclass(eq=False, slots=True)
class Scoring:
    """The tokens of a continuation, and the model's predictions for each of them."""

    token_ids: tuple[int, ...]
    keeps_distributions: bool = False
    """Whether the full distributions are kept, which takes 4 bytes per token and vocabulary entry."""
    num_likely: int | None = None
    """How many of the most likely tokens are kept at each position; None: `tokens` stay empty."""
    tokens: list[SampledToken] = field(default_factory=list, init=False)
    """With their likelihood, once they are complete."""
    logprobs: list[float | None] = field(init=False)
    """By token of the continuation; None until computed."""
    greedy_token_ids: list[int] = field(init=False)
    """The most likely token at each position."""
    distributions: Array | None = field(default=None, init=False)
    """[C, V], log probabilities, if they are kept."""

    def __post_init__(self) -> None:
        self.logprobs = [None] * len(self.token_ids)
        self.greedy_token_ids = [-1] * len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of the continuation."""
        return len(self.token_ids)

    @property
    def is_complete(self) -> bool:
        """Whether every token has its score."""
        return None not in self.logprobs

    def continued(self, layout: Layout) -> Layout:
        """A layout, about to be answered, with the continuation appended to its last span."""
        last = layout.last
        token_ids = (*last.token_ids, *self.token_ids[:-1])
        longer = replace(last, segment=replace(last.segment, token_ids=token_ids))
        return replace(layout, spans=(*layout.spans[:-1], longer), fresh_tokens=self.num_tokens)

    def note(self, first: int, logits: Array) -> None:
        """Records logits [R, V], which predict the tokens from number `first` on."""
        found, xp = log_softmax(logits), namespace(logits)
        last = first + len(found)
        self.logprobs[first:last] = found[list(range(len(found))), list(self.token_ids[first:last])].tolist()
        self.greedy_token_ids[first:last] = xp.argmax(found, axis=-1).tolist()
        if self.num_likely is not None:
            numbers = [self.num_likely] * len(found)
            self.tokens[first:last] = with_likelihood(logits, self.token_ids[first:last], numbers)
        if self.keeps_distributions:
            if self.distributions is None:
                shape = self.num_tokens, found.shape[1]
                self.distributions = xp.empty(shape, dtype=found.dtype, device=device(found))
            self.distributions[first:last] = found

    def output(self) -> ScoreOutput:
        """The scores, once every token has one."""
        logprobs = tuple(value for value in self.logprobs if value is not None)
        assert len(logprobs) == self.num_tokens, "it is complete"
        return ScoreOutput(self.token_ids, logprobs, tuple(self.greedy_token_ids))


def scoring_of(
    token_ids: Sequence[int], vocab_size: int, *, keeps_distributions: bool = False, num_likely: int | None = None
) -> Scoring:
    """Creates the scoring of a continuation.

    Raises:
        InvalidPrompt: it has no tokens, or a token that is not in the model's vocabulary.
    """
    ids = tuple(token_ids)
    if not ids:
        raise InvalidPrompt("a continuation needs at least one token, and this one has none")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidPrompt(f"a continuation has the token {token!r:.80}; the model's are 0 to {vocab_size - 1}")
    return Scoring(ids, keeps_distributions, num_likely)
