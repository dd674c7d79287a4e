"""Chosen keys: are they the best by dense scores, and how often do equal scores decide?

Scores that differ by rounding only may change places; a worse key by more than that is a fault. Where no query of an
indexer finds a key similar, its score is exactly 0: of such keys, the first ones are read here.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvmosaic.attention.dense import DenseAttention
from kvmosaic.engine.self_check import Comparison, worst_finding
from kvmosaic.layers import AttentionCall

_LIMIT = 1e-3
"""How much worse a chosen key may be, in root mean squares of a row's scores: both are sums in float32 or wider."""
_OWN_LIMITS = {torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""The same by the model's own code, which may score keys before they are rounded to the dtype of the cache."""


class Choices:
    """Compares choices, and counts the rows in which equal scores decide."""

    def __init__(self) -> None:
        self._found: list[Comparison] = []
        self._num_rows = 0
        self._num_tied = 0

    def compare(
        self, call: AttentionCall, scores: Float[Tensor, "R T"], chosen: Bool[Tensor, "R T"], *, is_ours: bool
    ) -> None:
        """Compares the keys that rows have chosen; our own choice must hold the first of equal ones."""
        seen = scores.isfinite()
        wanted = seen.sum(dim=1).clamp_max(call.num_chosen)
        is_free = seen.sum(dim=1) > call.num_chosen
        best = scores.sort(dim=1, descending=True).values.gather(1, wanted[:, None] - 1)
        worst = scores.masked_fill(~chosen, torch.inf).amin(dim=1, keepdim=True)
        size = scores.masked_fill(~seen, 0.0).square().sum(dim=1, keepdim=True) / seen.sum(dim=1, keepdim=True)
        worse = (best - worst).clamp_min(0) / size.sqrt().clamp_min(1e-30)
        is_wrong = (chosen & ~seen).any(dim=1) | (chosen.sum(dim=1) != wanted)
        tied = (scores == best) & seen
        room = wanted - (scores > best).sum(dim=1)
        decides = is_free & (tied.sum(dim=1) > room)
        if is_ours:
            none_similar = decides & (best[:, 0] == 0)
            is_wrong |= none_similar & ((chosen ^ DenseAttention.choose(scores, call.num_chosen)) & tied).any(dim=1)
        self._num_rows += int(is_free.sum())
        self._num_tied += int(decides.sum())
        difference = math.inf if bool(is_wrong.any()) else float(worse.max())
        reference = "the best by dense scores" if is_ours else "those of the model's own code"
        limit = _LIMIT if is_ours else _OWN_LIMITS.get(call.key.dtype, _LIMIT)
        self._found.append(Comparison("chosen keys", reference, difference, limit, f"layer {call.layer_index}"))

    def worst(self) -> list[Comparison]:
        """The finding with the largest difference, if anything was compared."""
        return [worst_finding(self._found)] if self._found else []

    @property
    def note(self) -> str:
        """How often equal scores decide, if they do."""
        if not self._num_tied:
            return ""
        return (
            f"equal scores decide which keys are read in {self._num_tied / self._num_rows:.0%} of the rows: no index "
            "query finds them similar. The first of them are read here, and other engines may read others"
        )
