"""The chunk index: every chunk that is cached or being computed, by key and by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvmosaic.cache.block_pool import BlockPool
from kvmosaic.cache.block_table import BlockTable
from kvmosaic.cache.chunk import MAX_NAMES, Chunk, ChunkState
from kvmosaic.cache.keys import TOKEN_BYTES, Key, KeyChain
from kvmosaic.errors import ChunkInUse, UnknownChunk
from kvmosaic.eviction import Candidate, EvictionPolicy, EvictionQueue


class ChunkIndex:
    """Finds chunks, counts who uses them, and lets idle ones leave.

        by key     key -> chunk                     being computed, or ready
        by name    (salt, name) -> chunks           one document under two system prompts is two chunks
        in line    ready, no users, not pinned      in the order of the eviction policy

    A chunk that is being computed can be found like any other: whoever finds it attaches to it and waits.

    Invariants:
        in line for eviction are exactly the chunks with `is_evictable`
        num_idle_blocks == the blocks of those
        the chunk's table holds one reference to each block, every user one more
    Always safe: `evict_one` with nobody in line; abandoning twice.

    Eviction takes O(log n) for n chunks under any policy (see `EvictionQueue`).
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        *,
        max_chunks: int,
        verify: bool = True,
    ) -> None:
        self.pool = pool
        self.max_chunks = max_chunks
        self.num_evictions = 0
        self.num_idle_blocks = 0
        self.num_pinned_blocks = 0
        self.num_pinned = 0
        self._chunks: dict[Key, Chunk] = {}
        self._names: dict[tuple[str, str], dict[Key, None]] = {}
        self._queue: EvictionQueue[Chunk] = EvictionQueue(policy)
        self._clock = clock
        self._verify = verify

    def __len__(self) -> int:
        return len(self._chunks)

    @property
    def num_idle(self) -> int:
        """Chunks that eviction could free."""
        return len(self._queue)

    def chunks(self) -> list[Chunk]:
        """All chunks, oldest first."""
        return list(self._chunks.values())

    def find(
        self, chain: KeyChain, root: Key, tokens: bytes, planned: Mapping[Key, tuple[Key, bytes]]
    ) -> tuple[Key, Chunk | None]:
        """The key of a chunk and the chunk under it, if there is one.

        A key that is taken by other tokens (a collision) is passed over and the next one is tried; `planned` tells root
        and tokens of chunks that are not in the index yet but will be.
        """
        key = chain.run_encoded(root, tokens)
        while True:
            chunk = self._chunks.get(key)
            is_taken = chunk is not None and not self.is_same(chunk, root, tokens)
            if not is_taken and planned.get(key, (root, tokens)) == (root, tokens):
                return key, chunk
            key = chain.next_after(key)

    def get(self, key: Key) -> Chunk | None:
        """The chunk with this key."""
        return self._chunks.get(key)

    def is_same(self, chunk: Chunk, root: Key, tokens: bytes) -> bool:
        """Whether a chunk holds these tokens and saw the same."""
        return not self._verify or (chunk.root == root and chunk.tokens == tokens)

    def named(self, name_or_key: str | Key, salt: str = "") -> list[Chunk]:
        """The chunks with this name in this tenant's part, or the one with this key.

        Raises:
            UnknownChunk: there is none.
        """
        if isinstance(name_or_key, str):
            found = [self._chunks[key] for key in self._names.get((salt, name_or_key), ())]
        else:
            chunk = self._chunks.get(name_or_key) if isinstance(name_or_key, bytes) else None
            found = [chunk] if chunk is not None else []
        if not found:
            shown = name_or_key.hex() if isinstance(name_or_key, bytes) else repr(name_or_key)[:80]
            raise UnknownChunk(
                f"no cached chunk is called {shown} among {len(self._chunks)}; it may have been evicted: "
                "warm it again, and pin it to keep it"
            )
        return found

    def create(self, key: Key, root: Key, tokens: bytes, start: int, salt: str) -> Chunk:
        """A new chunk that is being computed, with blocks for all of its tokens.

        Raises:
            OutOfBlocks: the pool has too few free blocks; nothing has changed.
        """
        assert key not in self._chunks and len(self._chunks) < self.max_chunks
        table = BlockTable(self.pool)
        table.append(len(tokens) // TOKEN_BYTES)
        now = self._clock()
        chunk = Chunk(key, root, tokens, start, salt, table, now, now)
        self._chunks[key] = chunk
        return chunk

    def name(self, chunk: Chunk, name: str) -> None:
        """Adds a name; the oldest of more than `MAX_NAMES` is forgotten."""
        if name in chunk.names:
            return
        chunk.names[name] = None
        self._names.setdefault((chunk.salt, name), {})[chunk.key] = None
        if len(chunk.names) > MAX_NAMES:
            self._unname(chunk, next(iter(chunk.names)))

    def hold(self, chunk: Chunk) -> None:
        """Adds a user, with a reference to each block."""
        self._unline(chunk)
        self.pool.retain(chunk.block_ids)
        chunk.users += 1
        chunk.last_used = self._clock()

    def leave(self, chunk: Chunk) -> None:
        """Takes a user and its references; the last user of an abandoned chunk frees it."""
        assert chunk.users > 0
        self.pool.release(chunk.block_ids)
        chunk.users -= 1
        chunk.last_used = self._clock()
        if chunk.is_abandoned and chunk.users == 0:
            chunk.table.release()
        self._line_up(chunk)

    def complete(self, chunk: Chunk, step: int) -> None:
        """Marks a chunk as ready: its last token is computed."""
        assert chunk.state is ChunkState.COMPUTING and chunk.num_computed == chunk.num_tokens
        chunk.state = ChunkState.READY
        chunk.completed_step = step
        self._line_up(chunk)

    def abandon(self, chunk: Chunk) -> None:
        """Makes a chunk that was not (correctly) computed unknown; its blocks are free when its last user has left."""
        if not chunk.is_abandoned:
            self._remove(chunk)
            chunk.state = ChunkState.ABANDONED

    def evict_one(self) -> Chunk | None:
        """Lets the first chunk in line leave; returns it, or None if nobody is in line."""
        chunk = self._queue.pop()
        if chunk is not None:
            self.num_idle_blocks -= len(chunk.block_ids)
            self._remove(chunk)
            self.num_evictions += 1
        return chunk

    def delete(self, chunks: Iterable[Chunk]) -> None:
        """Drops chunks, pinned or not; all of them or none.

        Raises:
            ChunkInUse: a request reads or computes one of them.
        """
        chosen = list(chunks)
        for chunk in chosen:
            if chunk.users:
                label = next(iter(chunk.names), chunk.key.hex())
                raise ChunkInUse(
                    f"the chunk {label!r} is used by {chunk.users} requests; delete it when they have ended"
                )
        for chunk in chosen:
            self._remove(chunk)

    def set_pinned(self, chunk: Chunk, pinned: bool) -> None:
        """Protects a chunk from eviction, or no longer."""
        if chunk.pinned != pinned:
            sign = 1 if pinned else -1
            self.num_pinned += sign
            self.num_pinned_blocks += sign * len(chunk.block_ids)
            self._unline(chunk)
            chunk.pinned = pinned
            self._line_up(chunk)

    def set_priority(self, chunk: Chunk, priority: float) -> None:
        """Changes how much a chunk is wanted; only the policy `priority` looks at it."""
        self._unline(chunk)
        chunk.priority = priority
        self._line_up(chunk)

    def check_invariants(self) -> None:
        """Checks index, names, line and references against each other."""
        chunks = self._chunks.values()
        for key, chunk in self._chunks.items():
            assert chunk.key == key and not chunk.is_abandoned and chunk.users >= 0
            assert chunk.num_tokens == len(chunk.tokens) // TOKEN_BYTES
            assert (chunk.num_computed == chunk.num_tokens) == chunk.is_ready
            assert (chunk in self._queue) == chunk.is_evictable
            assert all(self.pool.reference_count(block_id) == 1 + chunk.users for block_id in chunk.block_ids)
            assert all(key in self._names[chunk.salt, name] for name in chunk.names)
            chunk.table.check_invariants()
        assert len(self._chunks) <= self.max_chunks
        assert self.num_idle_blocks == sum(len(chunk.block_ids) for chunk in chunks if chunk.is_evictable)
        assert self.num_pinned == sum(chunk.pinned for chunk in chunks)
        assert self.num_pinned_blocks == sum(len(chunk.block_ids) for chunk in chunks if chunk.pinned)
        assert sum(map(len, self._names.values())) == sum(len(chunk.names) for chunk in chunks)

    def _line_up(self, chunk: Chunk) -> None:
        if chunk.is_evictable:
            self.num_idle_blocks += len(chunk.block_ids)
            progress = chunk.num_computed / chunk.num_tokens
            self._queue.add(chunk, Candidate(chunk.last_used, chunk.num_tokens, chunk.priority, progress))

    def _unline(self, chunk: Chunk) -> None:
        if chunk in self._queue:
            self._queue.discard(chunk)
            self.num_idle_blocks -= len(chunk.block_ids)

    def _unname(self, chunk: Chunk, name: str) -> None:
        del chunk.names[name]
        keys = self._names[chunk.salt, name]
        del keys[chunk.key]
        if not keys:
            del self._names[chunk.salt, name]

    def _remove(self, chunk: Chunk) -> None:
        self._unline(chunk)
        self.set_pinned(chunk, False)
        self._unline(chunk)
        for name in list(chunk.names):
            self._unname(chunk, name)
        del self._chunks[chunk.key]
        if chunk.users == 0:
            chunk.table.release()
