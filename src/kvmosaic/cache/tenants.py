"""Tenants: usage, pinned names and eviction queue of each one's chunks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvmosaic.cache.chunk import Chunk
from kvmosaic.errors import QuotaExceeded
from kvmosaic.eviction import EvictionQueue

MAX_PINNED_NAMES = 10_000
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
        if name not in self._names and len(self._names) >= MAX_PINNED_NAMES:
            raise QuotaExceeded(
                f"{len(self._names)} documents are pinned already and {MAX_PINNED_NAMES} is the limit; unpin one first"
            )
        self._names.add(name)

    def discard(self, name: str) -> None:
        """Removes a name; safe for an absent one."""
        self._names.discard(name)

    def cover(self, names: Iterable[str]) -> bool:
        """Whether one of a chunk's names is pinned."""
        return bool(self._names) and any(name in self._names or _PART.sub("", name) in self._names for name in names)


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """Chunk cache usage of one tenant."""

    num_chunks: int
    """Chunks in the index, those being computed included."""
    num_blocks: int
    """Their blocks, and those of chunks deleted or abandoned while in use and still referenced."""
    num_bytes: int
    quota_bytes: int | None
    """Maximum bytes; None: no limit of its own."""
    num_idle_blocks: int
    """Of its blocks, the evictable ones."""
    num_pinned_blocks: int
    """Of its blocks, those of pinned chunks."""
    num_evictions: int = 0
    """Of its chunks, those evicted since it had none."""


class TenantAccount:
    """Account of chunks and their blocks, with a queue of the evictable ones.

        num_blocks          ├─────── in the index ───────┤├─ leaving: deleted or abandoned, still in use ─┤
        eviction queue      ├─ idle ─┤
        num_pinned_blocks            ├─ pinned ─┤

    A chunk is in two accounts, that of its tenant and that of all tenants, and in both eviction queues or in neither,
    at the same place. So the next chunk to evict is known at once, for any tenant and for all together.
    Blocks that several chunks share count once (see `SharedBlocks`, which knows how many blocks a change concerns).
    """

    def __init__(self) -> None:
        self.quota_bytes: int | None = None
        self.quota_blocks: int | None = None
        self.pinned_names = PinnedNames()
        """Chunks with these names are pinned as soon as they are ready."""
        self.num_chunks = 0
        self.num_blocks = 0
        self.num_idle_blocks = 0
        self.num_pinned = 0
        self.num_pinned_blocks = 0
        self.num_evictions = 0
        self._queue: EvictionQueue[Chunk] = EvictionQueue()
        self._spared: dict[Chunk, None] = {}
        self.num_spared_blocks = 0

    @property
    def num_idle(self) -> int:
        """Chunks in the eviction queue."""
        return len(self._queue)

    @property
    def is_closed(self) -> bool:
        """Whether it is empty and can be removed."""
        return not self.num_blocks and self.quota_bytes is None and not self.pinned_names

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many more blocks are within the quota."""
        return self.quota_blocks is None or self.num_blocks + num_blocks <= self.quota_blocks

    def push(self, chunk: Chunk, num_blocks: int) -> None:
        """Adds a chunk, whose `queue_entry` was just set, to the eviction queue: `num_blocks` become idle."""
        self._queue.push(chunk)
        self.num_idle_blocks += num_blocks

    def remove(self, chunk: Chunk, num_blocks: int) -> None:
        """Removes a chunk from the eviction queue: `num_blocks` are idle no longer."""
        self._queue.remove(chunk)
        self.num_idle_blocks -= num_blocks

    def first(self) -> Chunk | None:
        """The chunk to evict first; None when the queue is empty."""
        return self._queue.first()

    def in_order(self) -> list[Chunk]:
        """The chunks in eviction order; for tests (it sorts)."""
        return self._queue.in_order()

    def spare(self, chunk: Chunk, now: float, until: float, max_blocks: int) -> None:
        """Spares a chunk until a time, later than those before, if all spared ones have at most so many blocks then."""
        self.end_sparing(chunk)
        while self._spared and (first := next(iter(self._spared))).spared_until <= now:
            self.end_sparing(first)
        if self.num_spared_blocks + chunk.num_blocks <= max_blocks:
            chunk.spared_until = until
            self._spared[chunk] = None
            self.num_spared_blocks += chunk.num_blocks

    def end_sparing(self, chunk: Chunk) -> None:
        """Spares a chunk no longer; safe for one that is not spared."""
        if chunk in self._spared:
            del self._spared[chunk]
            chunk.spared_until = 0.0
            self.num_spared_blocks -= chunk.num_blocks

    def note_pin(self, sign: int, num_blocks: int) -> None:
        """Counts a pinned chunk (1) or one that is no longer pinned (-1), and the blocks that this concerns."""
        self.num_pinned += sign
        self.num_pinned_blocks += sign * num_blocks
