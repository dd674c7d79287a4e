"""Pinned names: documents that a tenant wants pinned whenever they are computed."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvmosaic.errors import QuotaExceeded

MAX_KEPT_NAMES = 10_000
_PART = re.compile(r" \([0-9]+/[0-9]+\)$")


class PinnedNames:
    """Names of one tenant; chunks with such a name, or parts of a split document with one, are to be pinned."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str) -> None:
        """Adds a name.

        Raises:
            QuotaExceeded: too many names; the limit bounds memory, since names come from clients.
        """
        if name not in self._names and len(self._names) >= MAX_KEPT_NAMES:
            raise QuotaExceeded(
                f"{len(self._names)} documents are pinned already and {MAX_KEPT_NAMES} is the limit; unpin one first"
            )
        self._names.add(name)

    def discard(self, name: str) -> None:
        """Removes a name; safe for an absent one."""
        self._names.discard(name)

    def cover(self, names: Iterable[str]) -> bool:
        """Whether one of a chunk's names is pinned."""
        return bool(self._names) and any(name in self._names or _PART.sub("", name) in self._names for name in names)
