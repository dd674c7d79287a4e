"""A chunk: the keys and values of one document segment, kept whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from kvmosaic.cache.block_pool import BlockId
from kvmosaic.cache.block_table import BlockTable
from kvmosaic.cache.keys import Key, decode_tokens

MAX_NAMES = 16


class ChunkState(StrEnum):
    """How far a chunk has come."""

    COMPUTING = "computing"
    READY = "ready"
    ABANDONED = "abandoned"
    """Its owner ended, or its step failed, before it was complete: wait no longer, plan again."""


Place: TypeAlias = "tuple[float, int, Chunk]"
"""Rank, number (it counts up, so that equal ranks leave in the order in which they came), and whose place it is."""


@dataclass(slots=True, eq=False)
class Chunk:
    """One entry of the chunk index.

        COMPUTING ──advance──▶ READY ──evict, delete──▶ gone
            └─────abandon────▶ ABANDONED ──last user leaves──▶ gone

    One that is deleted while in use is only dropped from the index: nobody new finds it, and it goes when its last user
    leaves. Until then it changes state like any other: its owner completes it, and those who wait for it get it.

    Its blocks are written once, by the allocation that owns it, and never again. The chunk's table holds one reference
    to each block, and every allocation that reads it one more.
    """

    key: Key
    root: Key
    """What it saw and where it starts."""
    tokens: bytes
    """Its token ids, encoded; see `token_ids`."""
    start: int
    """Position of its first token, as computed."""
    salt: str
    tenant: str
    table: BlockTable
    created: float
    """Seconds on the KV cache's clock."""
    last_used: float
    identity: Key
    """What keys of later spans say of it: its run key, whatever hash its own key has."""
    names: tuple[str, ...] = ()
    """What people call it, latest last; at most `MAX_NAMES`, older ones are forgotten."""
    state: ChunkState = ChunkState.COMPUTING
    is_dropped: bool = False
    """No longer to be found: evicted, deleted or abandoned."""
    num_computed: int = 0
    """Tokens that are computed, or will be by the step being assembled."""
    pinned: bool = False
    priority: float = 0.5
    ref_count: int = 0
    """Allocations that hold it."""
    hits: int = 0
    """Spans that were allocated to it without computing it."""
    compute_ms: float = 0.0
    """Milliseconds that computing it took, as reported by the engine."""
    completed_step: int = -1
    """The step that completed it."""
    codec: str = ""
    """If it came from a tier in fewer bits than the model's: the codec that lost them."""
    is_stored: bool = False
    """Whether the tiers that outlive the process have it, or will soon."""
    place: Place | None = field(default=None, repr=False)
    """Where it stands in the lines for eviction; None while it may not leave."""

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
        """Whether whoever waits for it must plan again."""
        return self.state is ChunkState.ABANDONED

    @property
    def is_evictable(self) -> bool:
        """Whether it may leave when room is needed."""
        return self.state is ChunkState.READY and self.ref_count == 0 and not self.pinned and not self.is_dropped
