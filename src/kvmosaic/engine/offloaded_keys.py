"""Offloaded keys: index from document names to the keys of their chunks in the tiers."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass

from kvmosaic.cache import Chunk, Key
from kvmosaic.cache.groups import Groups

MAX_KEYS = 1_000_000
"""Beyond that, the oldest are dropped; each takes a few hundred bytes."""
MAX_NAMES = 64
"""max_names of one chunk; beyond that, the oldest are dropped."""
_PART = re.compile(r" \([0-9]+/[0-9]+\)$")


@dataclass(frozen=True, slots=True)
class _Known:
    tenant: str
    salt: str
    names: tuple[str, ...]


class OffloadedKeys:
    """Names of the chunks that this process offloaded to the tiers, or fetched from there.

        (tenant, name without its part) -> keys        "guide (2/3)" is found by "guide", too
        key -> tenant, salt, names                      at most `max_keys`

    The KV cache drops the names of a chunk on eviction, and a tier stores keys only; with this index a document can be
    deleted everywhere by its name. Chunks stored by other processes are not known.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._known: OrderedDict[Key, _Known] = OrderedDict()
        """Not a plain dict, whose deleted entries must be skipped to find the oldest."""
        self._keys: Groups[tuple[str, str], Key] = Groups()

    def __len__(self) -> int:
        return len(self._known)

    def keys(self) -> list[Key]:
        """All keys that are known."""
        return list(self._known)

    def note(self, chunk: Chunk) -> None:
        """Records the names of a chunk; earlier names stay."""
        before = self._known.get(chunk.key)
        names = tuple(dict.fromkeys((*(before.names if before else ()), *chunk.names)))[-MAX_NAMES:]
        if not names or (before is not None and before.names == names):
            return
        self.discard(chunk.key)
        self._known[chunk.key] = _Known(chunk.tenant, chunk.salt, names)
        for place in _places(chunk.tenant, names):
            self._keys.add(place, chunk.key)
        if len(self._known) > self._max_keys:
            self.discard(next(iter(self._known)))

    def discard(self, key: Key) -> None:
        """Removes a key; safe for an unknown one."""
        if (known := self._known.pop(key, None)) is None:
            return
        for place in _places(known.tenant, known.names):
            self._keys.discard(place, key)

    def named(self, name: str, salt: str | None, tenant: str, *, with_parts: bool = False) -> list[Key]:
        """The keys of a tenant's chunks with this name, under one salt or (None) any.

        `with_parts`: also the chunks of a split document's parts.
        """
        found = []
        for key in self._keys.members((tenant, _whole(name))):
            known = self._known[key]
            is_named = name in known.names or (with_parts and any(_whole(other) == name for other in known.names))
            if is_named and salt in (None, known.salt):
                found.append(key)
        return found

    def names(self, key: Key) -> tuple[str, ...]:
        """Names of a chunk, oldest first; empty if its key is not known."""
        known = self._known.get(key)
        return () if known is None else known.names

    def check_invariants(self) -> None:
        """Checks both maps against each other (for tests)."""
        assert len(self._known) <= self._max_keys
        pairs = {(place, key) for key, known in self._known.items() for place in _places(known.tenant, known.names)}
        assert pairs == {(place, key) for place in self._keys for key in self._keys.members(place)}
        assert all(self._keys.members(place) for place in self._keys)


def _places(tenant: str, names: tuple[str, ...]) -> set[tuple[str, str]]:
    return {(tenant, _whole(name)) for name in names}


def _whole(name: str) -> str:
    """Document name without the part number of a chunk."""
    return _PART.sub("", name)
