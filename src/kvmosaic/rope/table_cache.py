"""A small cache of rotation tables: an answer asks for the same ones in every step."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from kvmosaic.rope.rotation import Rotation, RotationTables

_Key = tuple[Rotation, tuple[int, ...], torch.dtype, torch.device]


class TableCache:
    """Tables of the lists of distances that were asked for last.

    Long lists belong to prompts, which come once: they are computed and not kept. What is handed out is shared, so
    nobody may write into it.
    """

    def __init__(self, max_entries: int = 64, max_distances: int = 256) -> None:
        """Keeps at most `max_entries` tables of at most `max_distances` rows each."""
        self.max_entries = max_entries
        self.max_distances = max_distances
        self._tables: OrderedDict[_Key, RotationTables] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tables)

    def tables(
        self, rotation: Rotation, distances: Tensor, *, dtype: torch.dtype, device: torch.device
    ) -> RotationTables:
        """What `rotation.tables` gives for the same arguments."""
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
