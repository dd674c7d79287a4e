"""LRU cache of rotation tables: decode needs the same ones in every step."""

from __future__ import annotations

from collections import OrderedDict

import torch
from jaxtyping import Num
from torch import Tensor

from kvmosaic.rope.rotation import Rotation, RotationTables

_Key = tuple[Rotation, tuple[int, ...], torch.dtype, torch.device]


class TableCache:
    """Tables of the most recently used lists of distances.

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
