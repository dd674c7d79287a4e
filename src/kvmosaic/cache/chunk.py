"""A chunk: the cached keys and values of one document segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from kvmosaic.cache.block_pool import BlockId
from kvmosaic.cache.block_table import BlockTable, SavedState
from kvmosaic.cache.keys import Key, decode_tokens

MAX_NAMES = 16


class ChunkState(StrEnum):
    """Progress of a chunk."""

    COMPUTING = "computing"
    READY = "ready"
    ABANDONED = "abandoned"
    """Its owner ended, or its step failed, before it was complete: waiting requests plan again."""


QueueEntry: TypeAlias = "tuple[float, int, Chunk]"
"""Rank, number (it counts up, so that equal ranks are evicted in FIFO order), and the chunk."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One entry of the chunk index.

        COMPUTING ──advance──▶ READY ──evict, delete──▶ freed
            └─────abandon────▶ ABANDONED ──last release──▶ freed

    A chunk that is deleted while in use is only dropped from the index: new lookups miss it, and its last release frees
    it. Until then it changes state like any other: its owner completes it, and waiting requests get it.

    Its blocks are written once, by the allocation that owns it. The chunk's table holds one reference to each block,
    and every allocation that reads it one more. Its first full blocks may be those of another chunk that saw the same
    and begins with the same tokens, such as an earlier text of a document; the last user frees them. While that one is
    being computed, this one waits for its kept tokens; if that one is abandoned, so is this one.
    """

    key: Key
    root: Key
    """Key of what it sees and where it starts."""
    tokens: bytes
    """Its token ids, encoded; see `token_ids`."""
    start: int
    """Position of its first token when computed."""
    salt: str
    tenant: str
    table: BlockTable
    created: float
    """Seconds on the KV cache's clock."""
    last_used: float
    identity: Key
    """Its run key, which goes into keys of later spans, independent of the hash of its own key."""
    names: tuple[str, ...] = ()
    """Its names, latest last; at most `MAX_NAMES`, the oldest are dropped."""
    state: ChunkState = ChunkState.COMPUTING
    is_dropped: bool = False
    """Not in the index any more: evicted, deleted or abandoned."""
    num_kept: int = 0
    """First tokens whose blocks it took over from a chunk that begins alike, instead of computing them."""
    start_source: Chunk | None = field(default=None, repr=False)
    """The unfinished chunk that computes its kept tokens; None if they are complete, or this chunk is."""
    num_shared: int = 0
    """First blocks that other chunks hold or have held, too; see `SharedBlocks`."""
    num_computed: int = 0
    """Computed tokens, kept ones and those of the step being assembled included."""
    pinned: bool = False
    priority: float = 0.5
    spared_until: float = 0.0
    """Until then, on the KV cache's clock, it counts as just used: a conversation that used it waits for a tool."""
    ref_count: int = 0
    """Allocations that hold it."""
    hits: int = 0
    """Cache hits: spans allocated to it without computing it."""
    compute_ms: float = 0.0
    """Milliseconds to compute all of its tokens: as reported by the engine, scaled up if first tokens were kept."""
    completed_step: int = -1
    """The step that completed it."""
    codec: str = ""
    """The lossy codec of the tier it was loaded from; empty if none."""
    saved_state: SavedState | None = field(default=None, repr=False)
    """For models with states: what its tokens do to a state."""
    is_stored: bool = False
    """Whether a persistent tier has it, or will soon."""
    queue_entry: QueueEntry | None = field(default=None, repr=False)
    """Its entry in the eviction queues; None while it is not evictable."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole chunk."""
        return self.table.num_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its token ids."""
        return decode_tokens(self.tokens)

    @property
    def block_ids(self) -> Sequence[BlockId]:
        """Its blocks in the chunk pool."""
        return self.table.block_ids

    @property
    def num_blocks(self) -> int:
        """Its blocks, counted."""
        return len(self.table.block_ids)

    @property
    def is_ready(self) -> bool:
        """Whether all of its tokens are computed (or will be by the step being assembled)."""
        return self.state is ChunkState.READY

    @property
    def is_abandoned(self) -> bool:
        """Whether waiting requests must plan again."""
        return self.state is ChunkState.ABANDONED

    @property
    def lacks_start(self) -> bool:
        """Whether some of its kept tokens are yet to be computed, by another chunk."""
        return self.start_source is not None and self.start_source.num_computed < self.num_kept

    @property
    def is_awaited(self) -> bool:
        """Whether it is being computed and others wait: for all of it, or for its first blocks."""
        has_sharers = self.num_shared * self.table.pool.block_size > self.num_kept
        return self.state is ChunkState.COMPUTING and (self.ref_count > 1 or has_sharers)

    @property
    def is_evictable(self) -> bool:
        """Whether it may be evicted."""
        return self.state is ChunkState.READY and self.ref_count == 0 and not self.pinned and not self.is_dropped
