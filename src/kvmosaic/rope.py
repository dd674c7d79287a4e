"""Rotary rotation of heads: its dimensions, pairing, frequencies and direction, found from queries and keys of a layer.

To find it, the same token is in every row and attention returns each token's own value. One forward has the rows at
several positions, another one has them all at position 0, and each row is compared with itself: only the position can
differ, not even rounding, which changes from row to row and grows from layer to layer. Every layout, direction and
frequency buffer is tried; the best one must explain all rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

_MANY = 1_024
"""Number of distances on the CPU from which they are deduplicated; a GPU would have to synchronize for it."""

RotationLayout = Literal["half", "interleaved"]


@dataclass(frozen=True, slots=True)
class RotationTables:
    """Cosines and sines of R distances, ready for `rotate`.

        rotated = x * cos + x[..., permutation] * sin

    cos, sin: [R, 1, D], 1 and 0 outside the rotary dimensions; the pair's sign is inside `sin`
    permutation: [D], the partner of every dimension (itself outside the rotary dimensions)
    is_identity: all distances are 0, so that `rotate` returns its input
    """

    cos: Float[Tensor, "R 1 D"]
    sin: Float[Tensor, "R 1 D"]
    permutation: Int[Tensor, " D"]
    rotation: Rotation | None
    """What they are of; None: known by its permutation only."""
    is_identity: bool = False

    def partners(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """`x[..., permutation]`."""
        return x[..., self.permutation] if self.rotation is None else self.rotation.partners(x)


@dataclass(frozen=True)
class Rotation:
    """The rotation R(a) that a layer applies to queries and keys at position a.

        half           pairs (0, r/2), (1, r/2 + 1), …      interleaved    pairs (0, 1), (2, 3), …

        head:  | …not rotated… | offset … offset + rotary_dim | …not rotated… |      head_dim numbers

    Equal rotations compare and hash equal, so layers with equal rotations can share their tables.
    """

    layout: RotationLayout
    offset: int
    """First rotary dimension inside the head."""
    rotary_dim: int
    """Number of rotary dimensions: two per frequency."""
    sign: int
    """+1 for the usual direction, -1 for the opposite one."""
    inv_freq: tuple[float, ...]
    """Angle per position of each pair, in float64."""
    head_dim: int

    def __post_init__(self) -> None:
        assert self.rotary_dim == 2 * len(self.inv_freq), "two dimensions per frequency"
        assert 0 <= self.offset <= self.head_dim - self.rotary_dim, "the rotary dimensions lie inside the head"
        assert self.sign in (-1, 1)

    def at(self, offset: int, head_dim: int) -> Rotation:
        """The same rotation in a head of another shape, such as a latent followed by its rotary part."""
        return replace(self, offset=offset, head_dim=head_dim)

    def tables(
        self, distances: Num[Tensor, " R"], *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> RotationTables:
        """Tables of R(distance) for every distance.

        Args:
            distances: [R] whole numbers, of either sign. On the CPU, outside of `torch.compile`, the all-zero case is
                detected and costs nothing.
            dtype: dtype of the tables. Angles are computed in float64 and cast at the end.
            device: device of the tables; default that of the distances.
        """
        on_host = distances.device.type == "cpu" and not torch.compiler.is_compiling()
        is_identity, numbers = on_host and not bool(distances.any()), None
        if on_host and len(distances) > _MANY:  # mostly of rows that read the same keys: each distance is computed once
            distances, numbers = torch.unique(distances, return_inverse=True)
        frequencies = torch.tensor(self.inv_freq, dtype=torch.float64, device=distances.device)
        angles = distances.to(torch.float64)[:, None] * (self.sign * frequencies)
        cos = torch.ones(len(distances), self.head_dim, dtype=torch.float64, device=distances.device)
        sin = torch.zeros_like(cos)
        rotary = torch.arange(self.offset, self.offset + self.rotary_dim, device=distances.device)
        first, second = paired(rotary, self.layout)
        cos[:, first] = cos[:, second] = angles.cos()
        sin[:, first] = -angles.sin()
        sin[:, second] = angles.sin()
        permutation = torch.arange(self.head_dim, device=distances.device)
        permutation[first], permutation[second] = second, first
        cos, sin = (table[:, None].to(device=device, dtype=dtype) for table in (cos, sin))
        if numbers is not None:
            cos, sin = (table[numbers.to(device=device)] for table in (cos, sin))
        return RotationTables(cos, sin, permutation.to(device=device), self, is_identity)

    def partners(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """`x[..., permutation]`, by slices and a concatenation instead of a gather: several times faster."""
        first, last, pairs = self.offset, self.offset + self.rotary_dim, len(self.inv_freq)
        if self.layout == "half":
            parts = [x[..., first + pairs : last], x[..., first : first + pairs]]
        else:
            parts = [x[..., first:last].reshape(*x.shape[:-1], pairs, 2).flip(-1).flatten(-2)]
        if first:
            parts.insert(0, x[..., :first])
        if last < self.head_dim:
            parts.append(x[..., last:])
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def paired(
    rotary: Num[Tensor, "*rows R"], layout: RotationLayout
) -> tuple[Num[Tensor, "*rows P"], Num[Tensor, "*rows P"]]:
    """The first and the second number of every pair of rotary dimensions, as views: half as many each."""
    if layout == "half":
        first, second = rotary.chunk(2, dim=-1)
        return first, second
    return rotary[..., 0::2], rotary[..., 1::2]


def rotate(x: Float[Tensor, "R H D"], tables: RotationTables) -> Float[Tensor, "R H D"]:
    """Rotates heads by the distances of the tables.

    `rotate(query, rotation.tables(-d))` is R(-d) q: the query that reads a key moved by d.

    Args:
        x: [R, H, D] (or anything that broadcasts with [R, 1, D]).
        tables: tables of R distances, or of 1.

    Returns:
        [R, H, D], in the wider dtype of `x` and the tables. `x` itself when every distance is 0.
    """
    if tables.is_identity:
        return x
    turned = x * tables.cos
    return turned.addcmul_(tables.partners(x).to(turned.dtype), tables.sin)


_Key = tuple[Rotation, tuple[int, ...], torch.dtype, torch.device]


class TableCache:
    """LRU cache of the tables of lists of distances: decode needs the same ones in every step.

    Long lists belong to prompts, which occur once: they are computed and not kept. Returned tables are shared and
    must not be written.
    """

    def __init__(self, max_entries: int = 64, max_distances: int = 256) -> None:
        """Creates a cache of max_entries tables with max_distances rows each."""
        self.max_entries = max_entries
        self.max_distances = max_distances
        self._tables: OrderedDict[_Key, RotationTables] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tables)

    def tables(
        self, rotation: Rotation, distances: Num[Tensor, " R"], *, dtype: torch.dtype, device: torch.device
    ) -> RotationTables:
        """Returns what `rotation.tables` gives for the same arguments."""
        if len(distances) > self.max_distances:
            return rotation.tables(distances, dtype=dtype, device=device)
        key = (rotation, tuple(distances.tolist()), dtype, device)
        found = self._tables.pop(key, None)
        if found is None:
            found = rotation.tables(distances, dtype=dtype, device=device)
            if len(self._tables) >= self.max_entries:
                self._tables.popitem(last=False)
        self._tables[key] = found
        return found


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
