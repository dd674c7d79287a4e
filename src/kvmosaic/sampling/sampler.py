"""Sampler: one token per row of logits, with the parameters of each row.

Logit filters are pure functions, R rows, V vocabulary: every one returns new logits and leaves its input as it was. A
removed token gets -inf; the most likely token of a row is never removed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvmosaic.errors import InvalidSampling
from kvmosaic.sampling.grammar import Matcher
from kvmosaic.sampling.params import SamplingParams

_LOWEST = -1e30


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A sampled token, with log probabilities if they were requested."""

    token_id: int
    logprob: float | None = None
    """Natural logarithm of its probability, before bias, penalties, temperature and filters."""
    rank: int | None = None
    """1 when no token is more likely."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens and their log probabilities, best first."""
    is_last: bool = False
    """The form of the answer (`structured_outputs`) is complete with it."""
    failure: str = ""
    """Why the answer cannot continue in its form; the token is meaningless then."""


class SamplingState:
    """Sampling state of one answer: its generator, its grammar state, and which tokens it has seen.

    The generator lives on the CPU and gives one number per token, so a seed means the same on every device and in every
    batch. Token counts are kept only if a penalty needs them.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        *,
        vocab_size: int,
        index: int = 0,
        ending_ids: Collection[int] = (),
        device: torch.device | str = "cpu",
        matcher: Matcher | None = None,
    ) -> None:
        """Begins an answer.

        Args:
            params: the sampling parameters.
            prompt_token_ids: tokens that the repetition penalty counts as seen.
            vocab_size: V.
            index: index of the answer, below `n`; it is added to the seed.
            ending_ids: ids that may not be sampled before `min_tokens`.
            device: device of the logits.
            matcher: the answer's grammar, at its beginning.

        Raises:
            InvalidSampling: every token would end an answer that may not end yet, or a biased token does not exist.
        """
        self.params = params
        self.matcher = matcher
        self.num_tokens = 0
        self._generator: torch.Generator | None = None
        if not params.is_greedy:
            self._generator = torch.Generator()
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed((params.seed + index + 2**63) % 2**64 - 2**63)
        ending = sorted({token_id for token_id in ending_ids if token_id < vocab_size})
        if len(ending) == vocab_size and params.min_tokens:
            raise InvalidSampling(
                f"all {vocab_size} token ids end the answer, so min_tokens={params.min_tokens} leaves none to draw; "
                "give fewer stop_token_ids"
            )
        biased = list(params.biases)
        if biased and max(biased) >= vocab_size:
            raise InvalidSampling(
                f"logit_bias has the token id {max(biased)}; this model has the ids 0 to {vocab_size - 1}: leave it out"
            )
        self.bias: tuple[Tensor, Tensor] | None = None
        """Biased ids, and what is added to their logits."""
        if biased:
            added = torch.tensor(list(params.biases.values()), dtype=torch.float32, device=device)
            self.bias = torch.tensor(biased, dtype=torch.long, device=device), added
        self._ending = torch.tensor(ending, dtype=torch.long, device=device)
        self.seen: Tensor | None = None
        self.counts: Tensor | None = None
        if params.has_penalties:
            self.counts = torch.zeros(vocab_size, dtype=torch.float32, device=device)
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[torch.tensor(list(prompt_token_ids), dtype=torch.long, device=device)] = True

    def append(self, token_id: int) -> None:
        """Records a token of the answer."""
        self.num_tokens += 1
        if self.matcher is not None:
            self.matcher.take(token_id)
        if self.counts is not None and self.seen is not None:
            self.counts[token_id] += 1
            self.seen[token_id] = True

    def draw(self) -> float:
        """The next random number of this answer, in [0, 1)."""
        assert self._generator is not None, "a greedy answer draws nothing"
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    @property
    def banned(self) -> Tensor | None:
        """Ids that may not be sampled now, or None."""
        return self._ending if self.num_tokens < self.params.min_tokens and len(self._ending) else None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is simply the largest logit."""
        is_free = self.banned is None and self.matcher is None and self.bias is None
        return self.params.is_greedy and not self.params.has_penalties and is_free


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """Samples one token per row and records it in the row's state.

    The order is vLLM's: grammar mask, bias, penalties, then temperature, min-p, top-k, top-p, then one draw. Greedy
    rows take the largest logit after the penalties.

    Args:
        logits: [R, V], any floating type.
        states: R states, one per row.

    Returns:
        R tokens; with log probabilities where `logprobs` were requested.
    """
    assert logits.ndim == 2 and logits.shape[0] == len(states), "one row of logits per state"
    if not states:
        return []
    chosen = _largest(logits)
    special = [row for row, state in enumerate(states) if not state.is_plain_greedy]
    if special:
        rows = torch.tensor(special, device=logits.device)
        picked = _sample_rows(logits[rows].float(), [states[row] for row in special])
        chosen = chosen.index_copy(0, rows, picked)
    token_ids = chosen.tolist()
    for state, token_id in zip(states, token_ids, strict=True):
        state.append(token_id)
    tokens = _with_logprobs(logits, token_ids, states)
    for row, state in enumerate(states):
        if (matcher := state.matcher) is not None:
            tokens[row] = replace(tokens[row], is_last=matcher.is_complete, failure=matcher.failure)
    return tokens


def _largest(logits: Tensor) -> Tensor:
    """Token ids [R] of the first largest logit of each row."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.detach().numpy().argmax(axis=-1))  # 10x faster than torch's
    return logits.argmax(dim=-1)


def _sample_rows(logits: Tensor, states: list[SamplingState]) -> Tensor:
    """Samples token ids [R] for rows that need more than the largest logit."""
    logits = _within_grammars(logits, states)
    for row, state in enumerate(states):
        if state.bias is not None:
            biased, added = state.bias
            logits[row, biased] += added
    logits = _penalized(logits, states)
    for row, state in enumerate(states):
        if state.banned is not None and state.matcher is None:
            logits[row, state.banned] = NEVER
    chosen = _largest(logits)
    random_rows = [row for row, state in enumerate(states) if not state.params.is_greedy]
    if random_rows:
        rows = torch.tensor(random_rows, device=logits.device)
        drawn = _draw(logits[rows], [states[row] for row in random_rows])
        chosen = chosen.index_copy(0, rows, drawn)
    return chosen


def _within_grammars(logits: Tensor, states: list[SamplingState]) -> Tensor:
    """Logits [R, V] masked by the grammars of the rows; every row keeps a token.

    Ends before `min_tokens` or with `ignore_eos` are masked, too, unless no other token is left.
    """
    rows = [row for row, state in enumerate(states) if state.matcher is not None]
    if not rows:
        return logits
    matchers = [matcher for state in states if (matcher := state.matcher) is not None]
    vocabulary = matchers[0].vocabulary
    allowed = torch.from_numpy(vocabulary.allowed(matchers))
    for row, mask, matcher in zip(rows, allowed, matchers, strict=True):
        state = states[row]
        early = [] if state.banned is None else state.banned.tolist()
        early += vocabulary.eos_token_ids if state.params.ignore_eos else ()
        if matcher.failure:
            mask.fill_(True)
        elif early:
            kept = mask.clone()
            kept[early] = False
            mask.copy_(kept if bool(kept.any()) else mask)
    index = torch.tensor(rows, device=logits.device)
    # Allowed but impossible (-inf) is still better than masked.
    part = logits[index].clamp(min=_LOWEST).masked_fill(~allowed.to(logits.device), NEVER)
    return logits.index_copy(0, index, part)


def _penalized(logits: Tensor, states: list[SamplingState]) -> Tensor:
    """Logits [R, V] after the penalties of the rows that have any."""
    rows = [row for row, state in enumerate(states) if state.params.has_penalties]
    if not rows:
        return logits
    index = torch.tensor(rows, device=logits.device)
    params = [states[row].params for row in rows]
    seen = torch.stack([s for row in rows if (s := states[row].seen) is not None])
    counts = torch.stack([c for row in rows if (c := states[row].counts) is not None])
    part = penalize_repetition(logits[index], seen, _column(logits, [p.repetition_penalty for p in params]))
    presence = _column(logits, [p.presence_penalty for p in params])
    frequency = _column(logits, [p.frequency_penalty for p in params])
    return logits.index_copy(0, index, penalize_presence(part, counts, presence, frequency))


def _draw(logits: Tensor, states: list[SamplingState]) -> Tensor:
    """Token ids [R], drawn from the filtered distribution of each row."""
    params = [state.params for state in states]
    logits = scale_temperature(logits, _column(logits, [p.temperature for p in params]))
    if any(p.min_p > 0 for p in params):
        logits = keep_min_p(logits, _column(logits, [p.min_p for p in params]))
    if any(p.top_k > 0 for p in params):
        logits = keep_top_k(logits, torch.tensor([p.top_k for p in params]))
    if any(p.top_p < 1 for p in params):
        top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=logits.device)
        logits = keep_top_p(logits, top_p)
    # Inverse of the cumulative distribution, in float64: one random number per row, and no token of probability 0.
    reached = torch.softmax(logits.double(), dim=-1).cumsum(dim=-1)
    drawn = torch.tensor([[state.draw()] for state in states], dtype=torch.float64, device=logits.device)
    found = torch.searchsorted(reached, drawn * reached[:, -1:], right=True).squeeze(1)
    last = (reached < reached[:, -1:]).sum(dim=-1)
    return torch.minimum(found, last)


def _with_logprobs(logits: Tensor, token_ids: list[int], states: Sequence[SamplingState]) -> list[SampledToken]:
    """Adds log probabilities of the unmodified logits where they were requested."""
    wanted = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    tokens = [SampledToken(token_id) for token_id in token_ids]
    if not wanted:
        return tokens
    numbers = [states[row].params.logprobs or 0 for row in wanted]
    rows = logits[torch.tensor(wanted, device=logits.device)]
    found = with_likelihood(rows, [token_ids[row] for row in wanted], numbers)
    for row, token in zip(wanted, found, strict=True):
        tokens[row] = token
    return tokens


def with_likelihood(logits: Tensor, token_ids: Sequence[int], numbers: Sequence[int]) -> list[SampledToken]:
    """R tokens with their log probabilities in logits [R, V], each beside this number of most likely ones."""
    values = torch.log_softmax(logits.float(), dim=-1)
    chosen = values.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    best = values.topk(min(max(numbers), values.shape[1]))
    # one read of all rows each: every read waits for the device
    read = (found.tolist() for found in (chosen[:, 0], (values > chosen).sum(1), best.indices, best.values))
    return [
        SampledToken(token_id, logprob, above + 1, tuple(zip(ids[:number], likely[:number], strict=True)))
        for token_id, number, logprob, above, ids, likely in zip(token_ids, numbers, *read, strict=True)
    ]


def _column(like: Tensor, values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)


NEVER = float("-inf")


def penalize_repetition(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Makes tokens of the prompt and the answer less likely, as in CTRL (Keskar et al., 2019).

    Args:
        logits: [R, V].
        seen: [R, V], True where the token occurs in the row's prompt or answer.
        penalty: [R], above 0; positive logits are divided by it, negative ones multiplied.
    """
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def penalize_presence(logits: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor) -> Tensor:
    """Makes tokens of the answer less likely: once for occurring, and once per occurrence.

    Args:
        logits: [R, V].
        counts: [R, V], how often the row's answer contains the token.
        presence: [R], subtracted where the count is above 0.
        frequency: [R], subtracted count times.
    """
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def scale_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divides logits [R, V] by temperature [R], above 0."""
    return logits / temperature[:, None]


def keep_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Removes tokens less likely than min_p [R] times the most likely one; 0 keeps all."""
    probabilities = torch.softmax(logits, dim=-1)
    lowest = probabilities.amax(dim=-1, keepdim=True) * min_p[:, None]
    return logits.masked_fill(probabilities < lowest, NEVER)


def keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keeps the top_k [R] (on the CPU) most likely tokens and all equal to the last of them; below 1 keeps all."""
    vocabulary = logits.shape[-1]
    wanted = top_k.clamp(max=vocabulary).masked_fill(top_k < 1, vocabulary)
    if bool((wanted == vocabulary).all()):
        return logits
    largest = int(wanted.masked_fill(wanted == vocabulary, 1).max())
    best, wanted = logits.topk(largest, dim=-1).values, wanted.to(logits.device)
    lowest = best.gather(1, (wanted.clamp(max=largest) - 1)[:, None])
    return logits.masked_fill((logits < lowest) & (wanted < vocabulary)[:, None], NEVER)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the most likely tokens that together reach top_p [R]; 1 keeps all (Holtzman et al., 2019).

    top_p is best given in float64: near 1, 1 - top_p has few digits in float32.
    """
    ascending, order = logits.sort(dim=-1, descending=False)
    reached = torch.softmax(ascending, dim=-1).cumsum(dim=-1)
    removed = (reached <= (1 - top_p).to(reached.dtype)[:, None]) & (top_p < 1)[:, None]
    removed[:, -1] = False
    return logits.masked_fill(torch.zeros_like(removed).scatter(1, order, removed), NEVER)
