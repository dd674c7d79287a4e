"""Learned positions: detects whether a model reads the positions it is given, and the size of its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kvmosaic.errors import UnsupportedModel
from kvmosaic.layers import AttentionCall
from kvmosaic.model.unsupported import WAY_OUT
from kvmosaic.rope import relative_error

Record = Callable[[Sequence[int], Sequence[int] | None], list[AttentionCall]]
"""Runs tokens at positions (None: as the model numbers them), and returns the attention calls."""
_SAME = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
_FINE_SAME = 1e-4
_ALIKE = {torch.bfloat16: 0.3, torch.float16: 0.1}
_FINE_ALIKE = 0.05
"""Relative change of a row in another place of the forward that rounding explains."""


def check_rows_are_alike(module: Any, calls: list[AttentionCall]) -> None:
    """Requires that one token at one position is the same in every row of a forward.

    Half of the rows may differ: in a tie between experts, rounding decides. The size of rounding errors does not matter
    here; a counted row differs altogether.

    Args:
        module: the transformers model.
        calls: attention calls for one token, at the same position in all rows.

    Raises:
        UnsupportedModel: the model counts rows instead of reading positions.
    """
    for call in calls:
        # the first layer has hardly rounded anything yet, and learned positions are added before it
        tolerances, fine = (_SAME, _FINE_SAME) if call is calls[0] else (_ALIKE, _FINE_ALIKE)
        limit = tolerances.get(call.key.dtype, fine)
        for part in call.rows:
            if float(_change(part[1:], part[:1]).median()) > limit:
                raise UnsupportedModel(
                    f"{type(module).__name__} counts the tokens of a forward instead of reading the positions it is "
                    f"given, so the position of a cached chunk cannot be passed to it; {WAY_OUT}"
                )


def check_begins_at_zero(module: Any, calls: list[AttentionCall], numbered: list[AttentionCall]) -> None:
    """Requires that a prompt begins at position 0.

    Args:
        module: the transformers model, whose values depend on the position.
        calls: attention calls for a few tokens at positions 0, 1, 2, …
        numbered: the same as the model numbers them itself.

    Raises:
        UnsupportedModel: the model numbers them differently.
    """
    for call, other in zip(calls, numbered, strict=True):
        if not _is_same(call.value, other.value):
            raise UnsupportedModel(
                f"{type(module).__name__} does not begin at position 0 when it numbers the tokens of a prompt itself, "
                f"and only such models can be run; {WAY_OUT}"
            )


def table_length(record: Record, token: int, positions: Sequence[int]) -> int | None:
    """Size of a model's position table; None if it has none.

    Args:
        record: see `Record`.
        token: any token.
        positions: some distinct ones. A look-up of these numbers plus a constant offset (OPT has one of 2) is theirs.
    """
    look_ups = _LookUps(positions)
    with look_ups:
        record([token] * len(positions), positions)
    return look_ups.num_positions


class _LookUps(TorchFunctionMode):
    """Records look-ups in embeddings."""

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


def _change(x: Tensor, expected: Tensor) -> Tensor:
    """[rows, heads, size]: distance of each row from the expected one, relative to the latter's norm."""
    x, expected = x.double().flatten(1), expected.double().flatten(1)
    change = (x - expected).square().sum(dim=-1) / expected.square().sum(dim=-1).clamp_min(1e-30)
    return change.sqrt()
