"""An allocation: the blocks, chunks and prefix entries that one running sequence holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.block_table import BlockCopy, BlockTable, SavedState
from kvmosaic.cache.chunk import Chunk
from kvmosaic.cache.groups import Twin
from kvmosaic.cache.keys import TOKEN_BYTES, Key, KeyChain
from kvmosaic.cache.plan import Action
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.prefix_entry import Holder, PrefixEntry
from kvmosaic.layout import Layout
from kvmosaic.prompt import SegmentKind


@dataclass(slots=True, eq=False)
class SpanAllocation:
    """One span of an allocation.

    Its table has slots for all of its tokens; the first `num_computed` of them hold keys and values, or will after the
    step being assembled.
    """

    index: int
    kind: SegmentKind
    action: Action
    """The final action; it may differ from the plan if something was evicted or cached in between."""
    table: BlockTable
    """Block table of its tokens; a chunk's table belongs to the chunk and is shared by all readers."""
    root: Key = field(repr=False)
    tokens: bytearray = field(repr=False)
    """Encoded token ids, answer included; empty for chunks."""
    chunk: Chunk | None = None
    is_owner: bool = False
    """Chunks: this span must compute it."""
    twin: Twin = ""
    """Owned chunks: when allocated, equal tokens of this tenant and salt were ready after other texts."""
    was_evicted: bool = False
    """Owned chunks: it was cached before, and evicted."""
    awaited_start: bool = False
    """Owned chunks: when allocated, its first tokens were yet to be computed by another chunk."""
    is_closed: bool = True
    """No token will be appended."""
    computed: int = 0
    """Tokens computed, for spans that are not chunks; read `num_computed`."""
    computed_step: int = -1
    """The step that computes the last of them; -1: none."""
    entries: list[PrefixEntry] = field(default_factory=list, repr=False)
    """The prefix entries of its first blocks, all acquired."""
    registered: list[PrefixEntry] = field(default_factory=list, repr=False)
    """The subset of `entries` that this span registered in step `registered_step`."""
    registered_step: int = -1
    state: SavedState | None = field(default=None, repr=False)
    """For models with states: the one after the last computed token."""
    given: list[PrefixEntry] = field(default_factory=list, repr=False)
    """The entries that got a state of step `registered_step`."""
    is_unregistrable: bool = False
    """A block could not or must not be registered, so later blocks cannot be either."""
    num_left: int = 0
    """Tokens already evicted from a rolling window's table: see `KVCache.evict_window`."""

    @property
    def num_tokens(self) -> int:
        """Tokens, the answer included."""
        return self.table.num_tokens

    @property
    def num_computed(self) -> int:
        """Tokens that hold keys and values, or will after the step being assembled."""
        return self.chunk.num_computed if self.chunk is not None else self.computed

    @property
    def can_advance(self) -> bool:
        """Whether this span computes its next token: not if another one does, or computes what is before it."""
        return self.chunk is None or (self.is_owner and not self.chunk.lacks_start)

    @property
    def is_ready(self) -> bool:
        """Whether all tokens are computed, or will be by the step being assembled."""
        return self.num_computed == self.num_tokens

    def register(self, prefix: PrefixCache, chain: KeyChain, step: int) -> None:
        """Registers its newly computed blocks: full ones, and the last block of a closed, complete span."""
        size = self.table.pool.block_size
        is_whole = self.is_closed and self.is_ready
        num_blocks = len(self.table.block_ids) if is_whole else self.computed // size
        if self.is_unregistrable or num_blocks == len(self.entries):
            return
        self._begin(step)
        width = size * TOKEN_BYTES
        for index in range(len(self.entries), num_blocks):
            tokens = bytes(self.tokens[index * width : (index + 1) * width])
            parent = self.entries[-1] if self.entries else None
            key = chain.extend_encoded(parent.key if parent else self.root, tokens)
            entry, is_new = prefix.register(key, self.root, parent, tokens, self.table.block_ids[index], step)
            if entry is None:
                self.is_unregistrable = True
                return
            self.entries.append(entry)
            if is_new:
                self.registered.append(entry)

    def give_states(self, prefix: PrefixCache, states: Sequence[tuple[int, SavedState]], step: int) -> None:
        """Lets registered blocks hold the states after their last tokens.

        Args:
            prefix: the cache that they are in.
            states: after so many tokens of the span.
            step: the step that computes these.
        """
        size = self.table.pool.block_size
        self._begin(step)
        for count, state in states:
            number = -(-count // size) - 1
            if number < len(self.entries) and number * size + len(self.entries[number].tokens) // TOKEN_BYTES == count:
                entry = self.entries[number]
                if prefix.states.give(entry, state):
                    self.given.append(entry)

    def _begin(self, step: int) -> None:
        if self.registered_step != step:
            self.registered, self.given, self.registered_step = [], [], step

    def register_tail(self, prefix: PrefixCache, chain: KeyChain, step: int) -> None:
        """Registers the partly filled last block of a span that no longer grows, with its computed tokens.

        A continued conversation finds it; a diverging one copies the common tokens. A block with other readers (another
        answer to the same prompt) is registered when the last reader releases it.
        """
        pool = self.table.pool
        size = pool.block_size
        first = len(self.entries) * size
        is_known_before = not self.is_unregistrable and not (self.entries and self.entries[-1].is_dropped)
        if not is_known_before or not first < self.computed < first + size:
            return
        block_id = self.table.block_ids[len(self.entries)]
        if pool.reference_count(block_id) > 1:
            return
        tokens = bytes(self.tokens[first * TOKEN_BYTES : self.computed * TOKEN_BYTES])
        parent = self.entries[-1] if self.entries else None
        key = chain.extend_encoded(parent.key if parent else self.root, tokens)
        entry, _ = prefix.register(key, self.root, parent, tokens, block_id, step)
        if entry is not None:
            self.entries.append(entry)

    def fork(self, prefix: PrefixCache) -> SpanAllocation:
        """The same span for a second holder; the caller raises a chunk's ref count."""
        prefix.acquire(self.entries)
        return SpanAllocation(
            index=self.index,
            kind=self.kind,
            action="reuse",
            table=self.table if self.chunk is not None else self.table.fork(),
            root=self.root,
            tokens=self.tokens.copy(),
            chunk=self.chunk,
            is_closed=self.is_closed,
            computed=self.computed,
            computed_step=self.computed_step,
            entries=self.entries.copy(),
            state=self.state,
            is_unregistrable=self.is_unregistrable,
            num_left=self.num_left,
        )


@dataclass(slots=True, eq=False)
class Allocation:
    """Everything one sequence holds: one span allocation per span of its layout, in order."""

    layout: Layout
    salt: str
    tenant: str
    spans: list[SpanAllocation]
    chain: KeyChain = field(repr=False)
    copies: list[BlockCopy] = field(default_factory=list)
    """Block copies to carry out before anything of the allocating step is written."""
    is_released: bool = False
    is_forgotten: bool = False
    """A step with it failed: only `release` is allowed."""
    priority: float = 0.5
    """Priority of its blocks in the prefix cache, 0 to 1, for the eviction policy `priority`."""

    @property
    def holder(self) -> Holder:
        """What an eviction policy knows of this sequence when it releases its blocks."""
        num_computed = sum(span.num_computed for span in self.spans)
        return Holder(self.priority, num_computed / max(sum(span.num_tokens for span in self.spans), 1))

    @property
    def last(self) -> SpanAllocation:
        """The span that the answer is appended to."""
        return self.spans[-1]

    @property
    def is_stale(self) -> bool:
        """Whether something it reads is invalid: release it and plan again.

        That is an abandoned chunk, or a prefix block or a state whose step failed.
        """
        return self.is_forgotten or any(
            (span.chunk is not None and span.chunk.is_abandoned)
            or (span.entries and span.entries[-1].is_dropped)
            or (span.state is not None and span.state.is_lost)
            for span in self.spans
        )

    def held_chunks(self) -> list[Chunk]:
        """Its chunks, without repetition."""
        return list({span.chunk.key: span.chunk for span in self.spans if span.chunk is not None}.values())


def freed_request_blocks(allocations: Iterable[Allocation], request_pool: BlockPool) -> int:
    """Blocks of the request pool that would be free or evictable if all of these allocations were released."""
    references: Counter[BlockId] = Counter()
    cached: set[BlockId] = set()
    for allocation in allocations:
        for span in allocation.spans:
            if span.chunk is None:
                references.update(span.table.block_ids)
                cached.update(entry.block_id for entry in span.entries if not entry.is_dropped)
    return sum(
        request_pool.reference_count(block_id) == count + (block_id in cached)  # the cache's own reference
        for block_id, count in references.items()
    )


def own_blocks(allocation: Allocation) -> int:
    """The first block of the last span with no other holder; all later ones are this allocation's own."""
    span = allocation.last
    cached = {entry.block_id for entry in span.entries if not entry.is_dropped}
    pool, first = span.table.pool, len(span.table.block_ids)
    for block_id in reversed(span.table.block_ids):
        if pool.reference_count(block_id) != 1 + (block_id in cached):
            break
        first -= 1
    return first
