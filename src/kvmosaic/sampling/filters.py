"""Logit filters: pure functions over rows of logits, one parameter per row.

R rows, V vocabulary. Every function returns new logits and leaves its input as it was. A removed token gets -inf; the
most likely token of a row is never removed.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
