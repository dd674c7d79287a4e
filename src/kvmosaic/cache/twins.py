"""Twins: chunks of equal tokens behind different system texts."""

from __future__ import annotations

from collections.abc import Mapping

from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.keys import Key
from kvmosaic.layout import Layout
from kvmosaic.prompt import SegmentKind


def sees_only_system(layout: Layout, index: int) -> bool:
    """Whether what a chunk saw, and where it starts, is decided by the system text alone."""
    seen = (layout.spans[view.span].segment.kind for view in layout.spans[index].views)
    return layout.strategy != "absolute" and all(kind is SegmentKind.SYSTEM for kind in seen)


class Twins:
    """Finds out, when a chunk is missing, whether it is there behind another system text.

    Such a miss is easily overlooked: a document that was warmed without the system text of the later requests is
    computed again. Only chunks of `sees_only_system` are listed; a lookup hashes the tokens once.
    """

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str, bytes], dict[Key, Chunk]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def add(self, chunk: Chunk) -> None:
        """Lists a chunk that can be found."""
        self._keys.setdefault((chunk.tenant, chunk.salt, chunk.tokens), {})[chunk.key] = chunk

    def discard(self, chunk: Chunk) -> None:
        """Takes a chunk off the list; safe for one that is not on it."""
        place = (chunk.tenant, chunk.salt, chunk.tokens)
        chunks = self._keys.get(place, {})
        chunks.pop(chunk.key, None)
        if not chunks:
            self._keys.pop(place, None)

    def has_ready(self, tenant: str, salt: str, tokens: bytes) -> bool:
        """Whether a chunk of these tokens is complete; ask when the one that is wanted is not there."""
        return any(chunk.is_ready for chunk in self._keys.get((tenant, salt, tokens), {}).values())

    def check_invariants(self, present: Mapping[Key, Chunk]) -> None:
        """Checks that exactly such chunks are listed as can be found, each in its place."""
        for (tenant, salt, tokens), chunks in self._keys.items():
            assert chunks, "a place without chunks is forgotten"
            for key, chunk in chunks.items():
                assert present.get(key) is chunk
                assert (chunk.tenant, chunk.salt, chunk.tokens) == (tenant, salt, tokens)
