"""Sampler: one token per row of logits, with the parameters of each row.

Logits are arrays of numpy, or tensors of torch on a device: all code is written for the standard interface of both
(https://data-apis.org/array-api). Logit filters are pure functions, R rows, V vocabulary: every one returns new logits
and leaves its input as it was. A removed token gets -inf; the most likely token of a row is never removed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from array_api_compat import device, is_torch_array

from kvmosaic.errors import InvalidSampling
from kvmosaic.sampling.grammar import Matcher
from kvmosaic.sampling.params import SamplingParams

Array: TypeAlias = Any
"""Of numpy, or a tensor of torch."""
_LOWEST = -1e30


def namespace(array: Array) -> Any:
    """The functions of the array interface: numpy's own, or what a library gives torch."""
    if isinstance(array, np.ndarray):
        return np
    from array_api_compat import torch

    return torch


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
        matcher: Matcher | None = None,
    ) -> None:
        """Begins an answer.

        Args:
            params: the sampling parameters.
            prompt_token_ids: tokens that the repetition penalty counts as seen.
            vocab_size: V.
            index: index of the answer, below `n`; it is added to the seed.
            ending_ids: ids that may not be sampled before `min_tokens`.
            matcher: the answer's grammar, at its beginning.

        Raises:
            InvalidSampling: every token would end an answer that may not end yet, or a biased token does not exist.
        """
        self.params = params
        self.matcher = matcher
        self.num_tokens = 0
        self._generator: np.random.Generator | None = None
        if not params.is_greedy:
            self._generator = np.random.default_rng(None if params.seed is None else (params.seed + index) % 2**64)
        ending = sorted({token_id for token_id in ending_ids if token_id < vocab_size})
        if len(ending) == vocab_size and params.min_tokens:
            raise InvalidSampling(
                f"all {vocab_size} token ids end the answer, so min_tokens={params.min_tokens} leaves none to draw; "
                "give fewer stop_token_ids"
            )
        if params.biases and max(params.biases) >= vocab_size:
            raise InvalidSampling(
                f"logit_bias has the token id {max(params.biases)}; this model has the ids 0 to {vocab_size - 1}: "
                "leave it out"
            )
        self._ending = ending
        self._prompt = prompt_token_ids if params.has_penalties else ()
        self._seen: tuple[Array, Array] | None = None

    def append(self, token_id: int) -> None:
        """Records a token of the answer."""
        self.num_tokens += 1
        if self.matcher is not None:
            self.matcher.take(token_id)
        if self._seen is not None:
            seen, counts = self._seen
            seen[token_id], counts[token_id] = True, counts[token_id] + 1

    def seen(self, logits: Array) -> tuple[Array, Array]:
        """[V], whether prompt or answer have a token, and [V], how often the answer has it; beside its logits [V]."""
        if self._seen is None:
            assert not self.num_tokens, "counted from the first token on"
            xp = namespace(logits)
            self._seen = (
                xp.zeros(logits.shape, dtype=xp.bool, device=device(logits)),
                xp.zeros(logits.shape, dtype=xp.float32, device=device(logits)),
            )
            self._seen[0][list(self._prompt)] = True
        return self._seen

    def draw(self) -> float:
        """The next random number of this answer, in [0, 1)."""
        assert self._generator is not None, "a greedy answer draws nothing"
        return float(self._generator.random())

    @property
    def banned(self) -> list[int]:
        """Ids that may not be sampled now."""
        return self._ending if self.num_tokens < self.params.min_tokens else []

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the next token is simply the largest logit."""
        is_free = not self.banned and self.matcher is None and not self.params.biases
        return self.params.is_greedy and not self.params.has_penalties and is_free


def sample(logits: Array, states: Sequence[SamplingState]) -> list[SampledToken]:
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
    logits = _on_host(logits)
    chosen = namespace(logits).argmax(logits, axis=-1)
    special = [row for row, state in enumerate(states) if not state.is_plain_greedy]
    if special:
        chosen[special] = _sample_rows(_as_float(logits[special]), [states[row] for row in special])
    token_ids = chosen.tolist()
    for state, token_id in zip(states, token_ids, strict=True):
        state.append(token_id)
    tokens = _with_logprobs(logits, token_ids, states)
    for row, state in enumerate(states):
        if (matcher := state.matcher) is not None:
            tokens[row] = replace(tokens[row], is_last=matcher.is_complete, failure=matcher.failure)
    return tokens


def _on_host(logits: Array) -> Array:
    """The same logits, as an array of numpy if they are in the memory of the CPU: it is up to 10x faster there."""
    if not is_torch_array(logits) or logits.device.type != "cpu":
        return logits
    logits = logits.detach()
    return (logits if logits.dtype.itemsize > 2 else logits.float()).numpy()


def _as_float(logits: Array) -> Array:
    """A copy of logits in float32."""
    xp = namespace(logits)
    return xp.astype(logits, xp.float32)


def _sample_rows(logits: Array, states: list[SamplingState]) -> Array:
    """Samples token ids [R] for rows that need more than the largest logit; the logits are overwritten."""
    xp = namespace(logits)
    _mask_by_grammars(logits, states)
    for row, state in enumerate(states):
        if biases := state.params.biases:
            logits[row, list(biases)] += xp.asarray(list(biases.values()), dtype=xp.float32, device=device(logits))
    _penalize(logits, states)
    for row, state in enumerate(states):
        if state.banned and state.matcher is None:
            logits[row, state.banned] = NEVER
    chosen = xp.argmax(logits, axis=-1)
    random_rows = [row for row, state in enumerate(states) if not state.params.is_greedy]
    if random_rows:
        chosen[random_rows] = _draw(logits[random_rows], [states[row] for row in random_rows])
    return chosen


def _mask_by_grammars(logits: Array, states: list[SamplingState]) -> None:
    """Masks logits [R, V] by the grammars of the rows; every row keeps a token.

    Ends before `min_tokens` or with `ignore_eos` are masked, too, unless no other token is left.
    """
    rows = [row for row, state in enumerate(states) if state.matcher is not None]
    if not rows:
        return
    matchers = [matcher for state in states if (matcher := state.matcher) is not None]
    vocabulary = matchers[0].vocabulary
    allowed = vocabulary.allowed(matchers)
    for row, mask, matcher in zip(rows, allowed, matchers, strict=True):
        state = states[row]
        early = [*state.banned, *(vocabulary.eos_token_ids if state.params.ignore_eos else ())]
        if matcher.failure:
            mask[:] = True
        elif early:
            kept = mask.copy()
            kept[early] = False
            mask[:] = kept if kept.any() else mask
    xp = namespace(logits)
    # Allowed but impossible (-inf) is still better than masked.
    possible = xp.where(logits[rows] < _LOWEST, _LOWEST, logits[rows])
    logits[rows] = xp.where(xp.asarray(allowed, device=device(logits)), possible, NEVER)


def _penalize(logits: Array, states: list[SamplingState]) -> None:
    """Applies the penalties of the rows that have any to logits [R, V]."""
    rows = [row for row, state in enumerate(states) if state.params.has_penalties]
    if not rows:
        return
    xp = namespace(logits)
    params = [states[row].params for row in rows]
    seen, counts = zip(*(states[row].seen(logits[row]) for row in rows), strict=True)
    part = penalize_repetition(logits[rows], xp.stack(seen), _column(logits, [p.repetition_penalty for p in params]))
    presence = _column(logits, [p.presence_penalty for p in params])
    frequency = _column(logits, [p.frequency_penalty for p in params])
    logits[rows] = penalize_presence(part, xp.stack(counts), presence, frequency)


def _draw(logits: Array, states: list[SamplingState]) -> Array:
    """Token ids [R], drawn from the filtered distribution of each row."""
    xp = namespace(logits)
    params = [state.params for state in states]
    logits = scale_temperature(logits, _column(logits, [p.temperature for p in params]))
    if any(p.min_p > 0 for p in params):
        logits = keep_min_p(logits, _column(logits, [p.min_p for p in params]))
    if any(p.top_k > 0 for p in params):
        logits = keep_top_k(logits, [p.top_k for p in params])
    if any(p.top_p < 1 for p in params):
        logits = keep_top_p(logits, [p.top_p for p in params])
    # Inverse of the cumulative distribution, in float64: one random number per row, and no token of probability 0.
    reached = xp.cumulative_sum(_softmax(xp.astype(logits, xp.float64)), axis=-1)
    drawn = xp.asarray([[state.draw()] for state in states], dtype=xp.float64, device=device(logits))
    found = xp.sum(reached <= drawn * reached[:, -1:], axis=-1)
    return xp.minimum(found, xp.sum(reached < reached[:, -1:], axis=-1))


def _with_logprobs(logits: Array, token_ids: list[int], states: Sequence[SamplingState]) -> list[SampledToken]:
    """Adds log probabilities of the unmodified logits where they were requested."""
    wanted = [row for row, state in enumerate(states) if state.params.logprobs is not None]
    tokens = [SampledToken(token_id) for token_id in token_ids]
    if wanted:
        numbers = [states[row].params.logprobs or 0 for row in wanted]
        found = with_likelihood(logits[wanted], [token_ids[row] for row in wanted], numbers)
        for row, token in zip(wanted, found, strict=True):
            tokens[row] = token
    return tokens


def with_likelihood(logits: Array, token_ids: Sequence[int], numbers: Sequence[int]) -> list[SampledToken]:
    """R tokens with their log probabilities in logits [R, V], each beside this number of most likely ones."""
    values = log_softmax(_as_float(_on_host(logits)))
    xp = namespace(values)
    chosen = values[list(range(len(token_ids))), list(token_ids)]
    # one read of all rows each: every read waits for the device
    above = xp.sum(xp.astype(values > chosen[:, None], xp.int32), axis=-1)
    read = (found.tolist() for found in (chosen, above, *_most_likely(values, max(numbers))))
    return [
        SampledToken(token_id, logprob, above + 1, tuple(zip(ids[:number], likely[:number], strict=True)))
        for token_id, number, logprob, above, ids, likely in zip(token_ids, numbers, *read, strict=True)
    ]


def _most_likely(values: Array, count: int) -> tuple[Array, Array]:
    """Indexes [R, count] of the largest values of each row, best first, and these values; the standard has no top-k."""
    count = min(count, values.shape[1])
    if is_torch_array(values):
        best = values.topk(count)
        return best.indices, best.values
    found = np.argpartition(values, -max(count, 1), axis=-1)[:, values.shape[1] - count :]
    order = np.argsort(-np.take_along_axis(values, found, axis=-1), axis=-1, kind="stable")
    found = np.take_along_axis(found, order, axis=-1)
    return found, np.take_along_axis(values, found, axis=-1)


def _softmax(logits: Array) -> Array:
    xp = namespace(logits)
    powers = xp.exp(logits - xp.max(logits, axis=-1, keepdims=True))
    return powers / xp.sum(powers, axis=-1, keepdims=True)


def log_softmax(logits: Array) -> Array:
    """Log probabilities [R, V] of logits [R, V]."""
    xp = namespace(logits)
    lower = logits - xp.max(logits, axis=-1, keepdims=True)
    return lower - xp.log(xp.sum(xp.exp(lower), axis=-1, keepdims=True))


def _column(like: Array, values: list[float]) -> Array:
    return namespace(like).asarray(values, dtype=like.dtype, device=device(like))


NEVER = float("-inf")


def penalize_repetition(logits: Array, seen: Array, penalty: Array) -> Array:
    """Makes tokens of the prompt and the answer less likely, as in CTRL (Keskar et al., 2019).

    Args:
        logits: [R, V].
        seen: [R, V], True where the token occurs in the row's prompt or answer.
        penalty: [R], above 0; positive logits are divided by it, negative ones multiplied.
    """
    xp, factor = namespace(logits), penalty[:, None]
    return xp.where(seen, xp.where(logits > 0, logits / factor, logits * factor), logits)


def penalize_presence(logits: Array, counts: Array, presence: Array, frequency: Array) -> Array:
    """Makes tokens of the answer less likely: once for occurring, and once per occurrence.

    Args:
        logits: [R, V].
        counts: [R, V], how often the row's answer contains the token.
        presence: [R], subtracted where the count is above 0.
        frequency: [R], subtracted count times.
    """
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def scale_temperature(logits: Array, temperature: Array) -> Array:
    """Divides logits [R, V] by temperature [R], above 0."""
    return logits / temperature[:, None]


def keep_min_p(logits: Array, min_p: Array) -> Array:
    """Removes tokens less likely than min_p [R] times the most likely one; 0 keeps all."""
    xp, probabilities = namespace(logits), _softmax(logits)
    lowest = xp.max(probabilities, axis=-1, keepdims=True) * min_p[:, None]
    return xp.where(probabilities < lowest, NEVER, logits)


def keep_top_k(logits: Array, top_k: Sequence[int]) -> Array:
    """Keeps the top_k (R numbers) most likely tokens and all equal to the last of them; below 1 keeps all."""
    vocabulary = logits.shape[-1]
    removed = [vocabulary - number if 0 < number < vocabulary else 0 for number in top_k]
    return _keep_largest(logits, namespace(logits).sort(logits, axis=-1), removed) if any(removed) else logits


def keep_top_p(logits: Array, top_p: Sequence[float]) -> Array:
    """Keeps the most likely tokens that together reach top_p (R numbers), and all equal to the last of them.

    1 keeps all (Holtzman et al., 2019).
    """
    xp = namespace(logits)
    ascending = xp.sort(logits, axis=-1)
    reached = xp.cumulative_sum(_softmax(ascending), axis=-1)
    # near 1, 1 - top_p has few digits in float32
    rest = _column(logits, [1 - number if number < 1 else -1.0 for number in top_p])
    removed = xp.sum(xp.astype(reached[:, :-1] <= rest[:, None], xp.int32), axis=-1)
    return _keep_largest(logits, ascending, removed)


def _keep_largest(logits: Array, ascending: Array, removed: Array) -> Array:
    """Removes so many of the smallest logits of each row, but none that equals one that stays."""
    lowest = ascending[list(range(len(ascending))), removed]
    return namespace(logits).where(logits < lowest[:, None], NEVER, logits)
