"""Same-text index: chunks of equal tokens after different system texts."""

from __future__ import annotations

from collections.abc import Mapping

from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.groups import Groups
from kvmosaic.cache.keys import Key
from kvmosaic.layout import Layout
from kvmosaic.prompt import SegmentKind


def sees_only_system(layout: Layout, index: int) -> bool:
    """Whether what a chunk saw, and where it starts, is determined by the system text alone."""
    seen = (layout.spans[view.span].segment.kind for view in layout.spans[index].views)
    return not layout.rules.takes_offsets and all(kind is SegmentKind.SYSTEM for kind in seen)


class SameTextIndex:
    """Tells, when a chunk misses, whether it is cached after another system text.

    Such a miss is easily overlooked: a document warmed without the system text of the later requests is recomputed.
    Only chunks of `sees_only_system` are indexed; a lookup hashes the tokens once.
    """

    def __init__(self) -> None:
        self._chunks: Groups[tuple[str, str, bytes], Chunk] = Groups()

    def __len__(self) -> int:
        return sum(len(self._chunks.members(place)) for place in self._chunks)

    def add(self, chunk: Chunk) -> None:
        """Indexes a chunk that lookups can find."""
        self._chunks.add((chunk.tenant, chunk.salt, chunk.tokens), chunk)

    def discard(self, chunk: Chunk) -> None:
        """Removes a chunk; safe for an absent one."""
        self._chunks.discard((chunk.tenant, chunk.salt, chunk.tokens), chunk)

    def has_ready(self, tenant: str, salt: str, tokens: bytes) -> bool:
        """Whether a chunk of these tokens is complete; ask after a miss."""
        return any(chunk.is_ready for chunk in self._chunks.members((tenant, salt, tokens)))

    def check_invariants(self, present: Mapping[Key, Chunk]) -> None:
        """Checks that exactly the chunks that lookups find are indexed, each in its place."""
        for place in self._chunks:
            chunks = self._chunks.members(place)
            assert chunks, "a place without chunks is forgotten"
            for chunk in chunks:
                assert present.get(chunk.key) is chunk
                assert (chunk.tenant, chunk.salt, chunk.tokens) == place
