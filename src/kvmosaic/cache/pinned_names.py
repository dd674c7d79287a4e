"""Kept names: what a tenant wants pinned, whenever it is computed."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvmosaic.errors import QuotaExceeded

MAX_KEPT_NAMES = 10_000
_PART = re.compile(r" \([0-9]+/[0-9]+\)$")


class PinnedNames:
    """Names of one tenant; a chunk that has one, or is a part of a split document that has one, is to be pinned."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Keeps a name.

        Raises:
            QuotaExceeded: there are too many; the limit bounds memory, since names come from outside.
        """
        if name not in self._names and len(self._names) >= MAX_KEPT_NAMES:
            raise QuotaExceeded(
                f"{len(self._names)} documents are pinned already and {MAX_KEPT_NAMES} is the limit; unpin one first"
            )
        self._names.add(name)

    def discard(self, name: str) -> None:
        """Keeps a name no longer; safe for one that is not kept."""
        self._names.discard(name)

    def cover(self, names: Iterable[str]) -> bool:
        """Whether one of a chunk's names is kept."""
        return bool(self._names) and any(name in self._names or _PART.sub("", name) in self._names for name in names)
