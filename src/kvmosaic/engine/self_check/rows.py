"""Row check: each token has its own queries, keys and values, and its keys rotate as detected at every position.

In two forwards attention returns each token's own value, so that rows can depend only on their token and position.
The same rows in another order must be the same rows: this finds queries scaled by the row number, or inputs mixed from
earlier tokens. One token at many positions must equal itself in the same row of the other forward, at position 0,
rotated: rounding, which differs from row to row, is the same in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvmosaic.engine.self_check.comparison import Comparison, worst_finding
from kvmosaic.layers import AttentionCall, LayerSpec
from kvmosaic.model.loaded import LoadedModel
from kvmosaic.model.probe.probe import record_calls
from kvmosaic.rope import ROTATION_TOLERANCES, Heads, of_equal_length, relative_error, turned_error

_MIXING = {torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative difference of a reordered row that rounding explains; rarely, another expert is chosen."""
_FINE_MIXING = 1e-4
_GROUP = 16
"""Rows per median: a defect shows in all rows from some number on, a tied expert in one of them."""
_FARTHEST = 100_000
_ANGLE_ERROR = 2.0**-22
"""At a far position: transformers multiplies position and frequency in float32."""


def check_rows(model: LoadedModel, tokens: Sequence[int]) -> list[Comparison]:
    """Two findings, on rows and on rotation; the second one only if keys can be moved.

    Raises:
        UnsupportedModel: the model cannot run these rows.
    """
    far = far_positions(model.max_positions)
    positions = row_positions(len(tokens), model.max_positions)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    permuted = order.tolist()
    again = [tokens[0]] * len(far)
    with torch.inference_mode():
        rows = record_calls(model.module, [*tokens, *again], [*positions, *far])
        others = record_calls(
            model.module,
            [*(tokens[row] for row in permuted), *again],
            [*(positions[row] for row in permuted), *[0] * len(far)],
        )
        findings = [_check_order(rows, others, order.to(model.device))]
        if model.is_movable:
            moved, home = ([_rows_from(call, len(tokens)) for call in calls] for calls in (rows, others))
            findings.append(_check_rotation(model.layers, moved, home, torch.tensor(far)))
    return findings


def row_positions(num_rows: int, max_positions: int | None) -> list[int]:
    """Positions of rows: the first half near, the others from 600 on, if the model has them."""
    limit = max_positions or _FARTHEST
    start = 600 if limit >= 600 + num_rows else max(limit - num_rows, 0)
    half = num_rows // 2
    return [*range(half), *range(start + half, start + num_rows)]


def far_positions(max_positions: int | None) -> list[int]:
    """Position 0, near ones, and increasingly far ones up to the model's max position."""
    limit = min(max_positions or _FARTHEST, _FARTHEST)
    positions = [0, 1, 7, 64, 200, 500, 601, 1000]
    while positions[-1] < limit:
        positions.append(positions[-1] * 8 // 5)
    return [*(position for position in positions if position < limit - 1), limit - 1]


def _rows_from(call: AttentionCall, first: int) -> Heads:
    return call.query[first:], call.key[first:], call.value[first:]


def _check_order(rows: list[AttentionCall], others: list[AttentionCall], order: Tensor) -> Comparison:
    limit = _MIXING.get(rows[0].query.dtype, _FINE_MIXING)
    findings = []
    for call, other in zip(rows, others, strict=True):
        for mine, theirs in zip(call.rows, other.rows, strict=True):
            change = relative_error(theirs[: len(order)].double(), mine[order].double()).square().mean(dim=-1).sqrt()
            # by row of the first forward, and of the second one
            changes = torch.stack((change[order.argsort()], change))
            medians = [part.median(dim=1).values.max() for part in torch.split(changes, _GROUP, dim=1)]
            difference = float(torch.stack(medians).max())
            findings.append(
                Comparison("a token", "itself in another row", difference, limit, f"layer {call.layer_index}")
            )
    return worst_finding(findings)


def _check_rotation(
    layers: Sequence[LayerSpec], moved: list[Heads], home: list[Heads], positions: Tensor
) -> Comparison:
    findings = []
    for layer, (query, key, value), (home_query, home_key, home_value) in zip(layers, moved, home, strict=True):
        limits = ROTATION_TOLERANCES[key.dtype] + _ANGLE_ERROR * positions
        errors = torch.stack(
            (
                relative_error(value.double(), home_value.double()).amax(dim=-1).cpu(),
                turned_error(key, home_key, positions, layer.rotation),
                turned_error(
                    of_equal_length(query.double(), home_query.double()), home_query, positions, layer.rotation
                ),
            )
        ).amax(dim=0)
        farthest = int((errors / limits).nan_to_num(torch.inf).argmax())
        findings.append(
            Comparison(
                "rotation",
                "the model's own",
                float(errors[farthest]),
                float(limits[farthest]),
                f"layer {layer.index} at position {int(positions[farthest])}",
            )
        )
    return worst_finding(findings)
