"""An account: the chunks of one tenant, or of all of them together, as numbers and a line."""

from __future__ import annotations

from dataclasses import dataclass

from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.pinned_names import PinnedNames
from kvmosaic.eviction import EvictionLine


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant has in the chunk cache."""

    num_chunks: int
    """Chunks that can be found, those being computed included."""
    num_blocks: int
    """Their blocks, and those of chunks that were deleted or given up while in use and are read to this moment."""
    num_bytes: int
    quota_bytes: int | None
    """Most bytes it may have; None: no limit of its own."""
    num_idle_blocks: int
    """Of its blocks, those that eviction may free now."""
    num_pinned_blocks: int
    """Of its blocks, those of pinned chunks."""


class TenantAccount:
    """Counts chunks and their blocks, and keeps those that may leave in line.

        num_blocks     ├────── found by others ───────┤├─ leaving: deleted or given up, still in use ─┤
        in line        ├─ idle ─┤
        num_pinned_blocks        ├─ pinned ─┤

    A chunk stands in two accounts, that of its tenant and that of all tenants, and in line in both or in neither, at
    the same place. So the next one to leave is known at once, whether any tenant's or a certain tenant's must go.
    """

    def __init__(self) -> None:
        self.quota_bytes: int | None = None
        self.quota_blocks: int | None = None
        self.kept = PinnedNames()
        """Chunks with these names are pinned as soon as they are ready."""
        self.num_chunks = 0
        self.num_blocks = 0
        self.num_idle_blocks = 0
        self.num_pinned = 0
        self.num_pinned_blocks = 0
        self._line: EvictionLine[Chunk] = EvictionLine()

    @property
    def num_idle(self) -> int:
        """Chunks in line."""
        return len(self._line)

    @property
    def is_closed(self) -> bool:
        """Whether there is nothing to remember."""
        return not self.num_blocks and self.quota_bytes is None and not self.kept

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks more stay within the quota."""
        return self.quota_blocks is None or self.num_blocks + num_blocks <= self.quota_blocks

    def push(self, chunk: Chunk) -> None:
        """Puts a chunk in line that has got a place."""
        assert chunk.place is not None
        self._line.enter(chunk.place)
        self.num_idle_blocks += chunk.num_blocks

    def remove(self, chunk: Chunk) -> None:
        """Takes a chunk out of the line that has given up its place."""
        assert chunk.place is None
        self._line.has_left()
        self.num_idle_blocks -= chunk.num_blocks

    def first(self) -> Chunk | None:
        """The chunk that leaves first; None when nobody is in line."""
        return self._line.first()

    def in_order(self) -> list[Chunk]:
        """The chunks in line, first to leave first; for tests (it sorts)."""
        return self._line.in_order()

    def note_pin(self, chunk: Chunk, sign: int) -> None:
        """Counts a pinned chunk (1) or one that is no longer pinned (-1)."""
        self.num_pinned += sign
        self.num_pinned_blocks += sign * chunk.num_blocks
