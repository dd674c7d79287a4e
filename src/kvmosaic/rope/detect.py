"""Finding a layer's rotation from the queries and keys it makes of one token at several positions.

The same token stands at every position and attention returns each token's own value, so nothing but the position can
differ between the rows. Every layout, direction and frequency buffer is tried; the best one must explain all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvmosaic.rope.rotation import Rotation, turn

PROBE_POSITIONS = (0, 1, 7, 64, 500)

ROTATION_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-4, torch.float64: 5e-4}
"""Error of one dimension, relative to its pair, that rounding while rotating explains.

That of float64 is float32's: transformers multiplies position and frequency in float32, also in a float64 model.
"""
_FLOOR = 1e-3
"""Dimensions smaller than this fraction of the root mean square are compared with it instead of with themselves."""


@dataclass(frozen=True, slots=True)
class Detection:
    """What was found out about one layer.

    rotation: None for a layer without positions (NoPE), or one that cannot be moved.
    residual: largest relative error of the best explanation, over positions, of queries and keys.
    reason: in words, why the layer's keys cannot be moved; empty when they can.
    """

    rotation: Rotation | None
    residual: float
    reason: str = ""

    @property
    def is_movable(self) -> bool:
        """Whether keys of this layer may be used at another position than their own."""
        return not self.reason


def detect_rotation(
    query: Tensor, key: Tensor, value: Tensor, positions: Sequence[int], frequencies: Sequence[Tensor]
) -> Detection:
    """Finds the rotation that explains how queries and keys of one token change with its position.

    A query may also be scaled by a number that depends on its own position (attention temperature): that commutes with
    the rotation. A key may not, for its position is what moves.

    Args:
        query: [P, H, D], the first row at position 0.
        key: [P, G, D].
        value: [P, G, Dv], which must not change.
        positions: P positions, the first one 0.
        frequencies: the model's frequency buffers, each [pairs].
    """
    assert positions[0] == 0, "the first probe position is 0"
    tolerance = ROTATION_TOLERANCES[query.dtype]
    query, key, value = (part.detach().to("cpu", torch.float64) for part in (query, key, value))
    if _largest(value, value[:1]) > tolerance:
        return Detection(None, 1.0, "its values depend on the position (learned positions, or values that are rotated)")
    query = query * (_norms(query[:1]) / _norms(query).clamp_min(1e-30))
    still = max(_largest(query, query[:1]), _largest(key, key[:1]))
    if still <= tolerance:
        return Detection(None, still)
    best, residual = None, float("inf")
    distances = torch.tensor(positions)
    for candidate in _candidates(frequencies, query.shape[-1]):
        error = max(float(turned_error(part, distances, candidate).max()) for part in (key, query))
        if error < residual:
            best, residual = candidate, error
    if residual <= tolerance:
        return Detection(best, residual)
    return Detection(None, residual, _reason(key, tolerance, bool(frequencies)))


def relative_error(x: Tensor, expected: Tensor, scale: Tensor | None = None) -> Tensor:
    """How far heads are from what is expected, every dimension measured by its own size.

    Trained models have a few dimensions a hundred times larger than the rest; a common measure would hear only those.

    Args:
        x: [P, G, D].
        expected: [P or 1, G, D].
        scale: [P or 1, G, D], what a dimension is measured by; default `expected`.

    Returns:
        [P, D], root mean square over heads.
    """
    size = (expected if scale is None else scale).square().mean(dim=1).sqrt()
    floor = _FLOOR * size.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-30)
    return (x - expected).square().mean(dim=1).sqrt() / torch.maximum(size, floor)


def _largest(x: Tensor, expected: Tensor) -> float:
    return float(relative_error(x, expected).max())


def turned_error(x: Tensor, positions: Tensor, rotation: Rotation | None) -> Tensor:
    """Error of the explanation "row p is row 0, rotated by its position", dimensions measured by their pair.

    Args:
        x: [P, G, D], the first row at position 0.
        positions: [P], on the CPU.
        rotation: None: rows do not depend on positions.

    Returns:
        [P], the largest error of any dimension.
    """
    x = x.detach().to("cpu", torch.float64)
    if rotation is None:
        return relative_error(x, x[:1]).amax(dim=-1)
    tables = rotation.tables(positions, dtype=torch.float64)
    pair = (x[:1].square() + rotation.partners(x[:1]).square()).sqrt()
    return relative_error(x, turn(x[:1], tables), pair).amax(dim=-1)


def _candidates(frequencies: Sequence[Tensor], head_dim: int) -> Iterator[Rotation]:
    """Every rotation that fits the head: layout, place, direction and frequency buffer."""
    for buffer in frequencies:
        inv_freq = tuple(buffer.to("cpu", torch.float64).tolist())
        rotary_dim = 2 * len(inv_freq)
        if not 0 < rotary_dim <= head_dim:
            continue
        for offset in sorted({0, head_dim - rotary_dim}):
            for sign in (1, -1):
                yield Rotation("half", offset, rotary_dim, sign, inv_freq, head_dim)
                yield Rotation("interleaved", offset, rotary_dim, sign, inv_freq, head_dim)


def _norms(x: Tensor) -> Tensor:
    """Length of every row over all heads, [P, 1, 1]."""
    return x.square().sum(dim=(1, 2), keepdim=True).sqrt()


def _reason(key: Tensor, tolerance: float, has_frequencies: bool) -> str:
    if not has_frequencies:
        return "its keys depend on the position and the model has no rotary frequencies"
    if float((_norms(key) / _norms(key[:1]).clamp_min(1e-30) - 1).abs().max()) > tolerance:
        return "its keys are rotated and then scaled per dimension, or moved: no rotation takes them to another place"
    return "its keys change with the position in a way that no known rotation explains"
