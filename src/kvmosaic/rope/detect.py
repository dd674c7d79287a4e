"""Detection of a layer's rotation from its queries and keys for one token at several positions.

The same token is in every row and attention returns each token's own value. One forward has the rows at several
positions, another one has them all at position 0, and each row is compared with itself: only the position can
differ, not even rounding, which changes from row to row and grows from layer to layer. Every layout, direction and
frequency buffer is tried; the best one must explain all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvmosaic.rope.rotation import Rotation, rotate

PROBE_POSITIONS = (0, 1, 7, 64, 500)

Heads = tuple[Float[Tensor, "T H D"], Float[Tensor, "T G D"], Float[Tensor, "T G Dv"]]
"""Queries, keys and values of the same rows, each [rows, heads, size]."""

ROTATION_TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-4, torch.float64: 5e-4}
"""Error of one dimension, relative to its pair, that rounding during the rotation explains.

That of float64 is float32's: transformers multiplies position and frequency in float32, also in a float64 model.
"""
_FLOOR = 1e-3
"""Dimensions smaller than this fraction of the root mean square are compared with it instead of with themselves."""


@dataclass(frozen=True, slots=True)
class Detection:
    """Detected rotation of one layer.

    rotation: None for a layer without positions (NoPE), or one that cannot be moved.
    residual: largest relative error of the best explanation, over positions, of queries and keys.
    reason: why the layer's keys cannot be moved; empty when they can.
    """

    rotation: Rotation | None
    residual: float
    reason: str = ""

    @property
    def is_movable(self) -> bool:
        """Whether keys of this layer may be used at another position than the one they were computed at."""
        return not self.reason


def detect_rotation(
    moved: Heads, home: Heads, positions: Sequence[int], frequencies: Sequence[Float[Tensor, " F"]]
) -> Detection:
    """Finds the rotation that explains how queries and keys of one token change with its position.

    A query may also be scaled by a number that depends on its own position (attention temperature): that commutes with
    the rotation. A key may not, for its position is what moves.

    Args:
        moved: queries [P, H, D], keys [P, G, D] and values [P, G, Dv] of one token at P positions.
        home: the same rows, all at position 0.
        positions: P positions.
        frequencies: the model's frequency buffers, each [pairs].
    """
    tolerance = ROTATION_TOLERANCES[moved[0].dtype]
    query, key, value = (part.detach().to("cpu", torch.float64) for part in moved)
    home_query, home_key, home_value = (part.detach().to("cpu", torch.float64) for part in home)
    if _largest(value, home_value) > tolerance:
        return Detection(None, 1.0, "its values depend on the position (learned positions, or values that are rotated)")
    query = of_equal_length(query, home_query)
    still = max(_largest(query, home_query), _largest(key, home_key))
    if still <= tolerance:
        return Detection(None, still)
    best, residual = None, float("inf")
    places = torch.tensor(positions)
    for candidate in _candidates(frequencies, query.shape[-1]):
        rows = ((key, home_key), (query, home_query))
        error = max(float(turned_error(part, at_home, places, candidate).max()) for part, at_home in rows)
        if error < residual:
            best, residual = candidate, error
    if residual <= tolerance:
        return Detection(best, residual)
    return Detection(None, residual, _reason(key, home_key, tolerance, bool(frequencies)))


def of_equal_length(query: Float[Tensor, "P H D"], home: Float[Tensor, "#P H D"]) -> Float[Tensor, "P H D"]:
    """Queries [P, H, D] without a factor that depends on their own position: it commutes with the rotation."""
    return query * (_norms(home) / _norms(query).clamp_min(1e-30))


def relative_error(
    x: Float[Tensor, "P G D"], expected: Float[Tensor, "#P G D"], scale: Float[Tensor, "#P G D"] | None = None
) -> Float[Tensor, "P D"]:
    """Difference of heads from the expected ones, every dimension measured by its own size.

    Trained models have a few dimensions a hundred times larger than the rest, which would dominate a common measure.

    Args:
        x: [P, G, D].
        expected: [P or 1, G, D].
        scale: [P or 1, G, D], the measure of a dimension; default `expected`.

    Returns:
        [P, D], root mean square over heads.
    """
    size = (expected if scale is None else scale).square().mean(dim=1).sqrt()
    floor = _FLOOR * size.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-30)
    return (x - expected).square().mean(dim=1).sqrt() / torch.maximum(size, floor)


def _largest(x: Tensor, expected: Tensor) -> float:
    return float(relative_error(x, expected).max())


def turned_error(
    x: Float[Tensor, "P G D"], home: Float[Tensor, "#P G D"], positions: Int[Tensor, " P"], rotation: Rotation | None
) -> Float[Tensor, " P"]:
    """Error of the explanation "row p is its row at position 0, rotated"; dimensions measured by their pair.

    Args:
        x: [P, G, D].
        home: [P, G, D], the same rows at position 0.
        positions: [P], on the CPU.
        rotation: None: rows do not depend on positions.

    Returns:
        [P], the largest error of any dimension.
    """
    x, home = (part.detach().to("cpu", torch.float64) for part in (x, home))
    if rotation is None:
        return relative_error(x, home).amax(dim=-1)
    tables = rotation.tables(positions, dtype=torch.float64)
    pair = (home.square() + rotation.partners(home).square()).sqrt()
    return relative_error(x, rotate(home, tables), pair).amax(dim=-1)


def _candidates(frequencies: Sequence[Tensor], head_dim: int) -> Iterator[Rotation]:
    """Every rotation that fits the head: layout, offset, direction and frequency buffer."""
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


def _reason(key: Tensor, home: Tensor, tolerance: float, has_frequencies: bool) -> str:
    if not has_frequencies:
        return "its keys depend on the position and the model has no rotary frequencies"
    if float((_norms(key) / _norms(home).clamp_min(1e-30) - 1).abs().max()) > tolerance:
        return "its keys are rotated and then scaled per dimension, or moved: no rotation takes them to another place"
    return "its keys change with the position in a way that no known rotation explains"
