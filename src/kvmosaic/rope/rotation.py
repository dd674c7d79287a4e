"""Rotary rotation: dimensions of a head that rotate, their pairing, frequencies and direction."""

from __future__ import annotations

from collections import OrderedDict
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
    rotation: Rotation
    is_identity: bool = False


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
    return turned.addcmul_(tables.rotation.partners(x).to(turned.dtype), tables.sin)


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
