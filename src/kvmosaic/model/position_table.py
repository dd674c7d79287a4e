"""Learned positions: whether a model reads the positions it is given, and how many its table holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvmosaic.errors import UnsupportedModel
from kvmosaic.model.hook import AttentionCall
from kvmosaic.model.refusing import WAY_OUT
from kvmosaic.rope import relative_error

Record = Callable[[Sequence[int], Sequence[int] | None], list[AttentionCall]]
"""Runs tokens at positions (None: where the model puts them itself), and returns the calls of attention."""
_SAME = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_FINE_SAME = 1e-4


def check_positions_are_read(module: Any, record: Record, tokens: Sequence[int], calls: list[AttentionCall]) -> None:
    """Requires that one token at one position is always the same, and that a prompt begins at position 0.

    Args:
        module: the transformers model, whose values depend on the position.
        record: see `Record`.
        tokens: a few tokens.
        calls: what they gave at positions 0, 1, 2, …

    Raises:
        UnsupportedModel: the model counts rows instead, or numbers them differently.
    """
    place = len(tokens) - 1
    for call in record([tokens[0]] * len(tokens), [place] * len(tokens)):
        if not _is_same(call.value, call.value[:1].expand_as(call.value)):
            raise UnsupportedModel(
                f"{type(module).__name__} counts the tokens of a forward instead of reading the positions it is given, "
                f"so it cannot be told where a cached chunk stands; {WAY_OUT}"
            )
    for call, other in zip(calls, record(tokens, None), strict=True):
        if not _is_same(call.value, other.value):
            raise UnsupportedModel(
                f"{type(module).__name__} does not begin at position 0 when it numbers the tokens of a prompt itself, "
                f"and only such models can be run; {WAY_OUT}"
            )


def table_length(record: Record, token: int, positions: Sequence[int]) -> int | None:
    """How many positions the table holds that a model looks positions up in; None if it has none.

    Args:
        record: see `Record`.
        token: any one.
        positions: some different ones. A look-up of these numbers plus the same offset (OPT has one of 2) is theirs.
    """
    look_ups = _LookUps(positions)
    with look_ups:
        record([token] * len(positions), positions)
    return look_ups.num_positions


class _LookUps(TorchFunctionMode):
    """Watches what is looked up in embeddings."""

    def __init__(self, positions: Sequence[int]) -> None:
        super().__init__()
        self._positions = torch.tensor(positions)
        self.num_positions: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.embedding:
            self._note(*args[:2])
        return func(*args, **(kwargs or {}))

    def _note(self, indices: Tensor, table: Tensor) -> None:
        if indices.numel() != len(self._positions):
            return
        offsets = indices.flatten().cpu() - self._positions
        first = int(offsets[0])
        if first >= 0 and bool((offsets == first).all()):
            length = table.shape[0] - first
            self.num_positions = length if self.num_positions is None else min(length, self.num_positions)


def _is_same(x: Tensor, expected: Tensor) -> bool:
    tolerance = _SAME.get(x.dtype, _FINE_SAME)
    return float(relative_error(x.double(), expected.double()).square().mean().sqrt()) <= tolerance
