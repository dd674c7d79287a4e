"""The chunk index: all chunks, cached or being computed, by key and by name."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.block_table import BlockTable
from kvmosaic.cache.chunk import MAX_NAMES, Chunk, ChunkState
from kvmosaic.cache.groups import Groups, SameTextIndex, SharedBlocks, SharedStart, Starts
from kvmosaic.cache.keys import TOKEN_BYTES, Key, KeyChain
from kvmosaic.cache.tenants import TenantAccount
from kvmosaic.errors import ChunkInUse, OutOfBlocks, UnknownChunk
from kvmosaic.eviction import Candidate, EvictionPolicy

MAX_EVICTED = 2**14
"""Evicted chunks that are remembered by their keys."""

_MAX_PINNED_SHARE = 0.5
"""Share of a tenant's blocks for pins of pinned names: each system prompt makes another chunk of a document."""
SPARED_SECONDS = 300.0
"""How long documents of a conversation that waits for a tool count as just used."""
_MAX_SPARED_SHARE = 0.5
"""Share of a tenant's blocks for them."""


class ChunkIndex:
    """Index of all chunks, with lookup by key and by name, ref counts, quotas and eviction.

        by key     key -> chunk                     being computed, or ready
        by name    (tenant, name) -> chunks         one document under two system prompts is two chunks
        same text  equal tokens -> chunks           after different system texts
        starts     root -> chunks by tokens         its first blocks may be shared
        dependents chunk -> chunks                  chunks waiting for its first blocks
        leaving    deleted or abandoned             still referenced, not found by lookups
        accounts   all tenants, and each one        usage and eviction order

    A chunk that is being computed is found like any other: the new allocation acquires it and waits.

    Invariants:
        the eviction queue holds exactly the chunks with `is_evictable`
        a tenant above its quota has an empty eviction queue: chunks that become idle then are evicted at once
        the chunk's table holds one reference to each block, each acquirer one more, for every chunk that shares it
    Always safe: `evict_one` with an empty queue; abandoning twice.

    Eviction takes O(log n) for n chunks under any policy (see `EvictionQueue`), of all tenants or of one.
    """

    def __init__(
        self,
        pool: BlockPool,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        *,
        max_chunks: int,
        bytes_per_block: int = 1,
        verify: bool = True,
    ) -> None:
        self.pool = pool
        self.max_chunks = max_chunks
        self.num_evictions = 0
        self.on_evict: Callable[[Chunk], None] = lambda _: None
        """Called with every chunk evicted for capacity, while its blocks still hold it; must not raise."""
        self.on_delete: Callable[[Chunk], None] = lambda _: None
        """Called with every deleted chunk; must not raise."""
        self.on_free: Callable[[Chunk], None] = lambda _: None
        """Called with every chunk right before its blocks are freed; must not raise."""
        self.total = TenantAccount()
        """All tenants together."""
        self.same_text = SameTextIndex()
        self.starts: Starts[Chunk] = Starts(pool.block_size)
        self.shared = SharedBlocks()
        self.unwritten_step = -1
        """The step being assembled: the chunks that it completes are not written yet; -1 for none."""
        self._unwritten: list[Chunk] = []
        """Chunks that it completes; they depend on the source of their first blocks until they are written."""
        self.bytes_per_block = bytes_per_block
        """Of all layers together."""
        self._policy = policy
        self._evicted_rank = 0.0
        self._accounts: dict[str, TenantAccount] = {}
        self._changed: set[str] = set()
        self._chunks: dict[Key, Chunk] = {}
        self._names: Groups[tuple[str, str], Key] = Groups()
        self._dependents: Groups[Chunk, Chunk] = Groups()
        self._leaving: set[Chunk] = set()
        self._evicted: dict[Key, None] = {}
        """Keys of the latest evicted chunks."""
        self._clock = clock
        self._verify = verify
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._chunks)

    def chunks(self) -> list[Chunk]:
        """All chunks, oldest first."""
        return list(self._chunks.values())

    def account(self, tenant: str) -> TenantAccount:
        """A tenant's account; a tenant without one gets an empty account to read, or to `open`."""
        return self._accounts.get(tenant) or TenantAccount()

    def open(self, tenant: str) -> TenantAccount:
        """A tenant's account, created if missing; `close` it when it is empty."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = TenantAccount()
        return account

    def close(self, tenant: str) -> None:
        """Removes an empty account."""
        account = self._accounts.get(tenant)
        if account is not None and account.is_closed:
            del self._accounts[tenant]

    def take_changed(self) -> set[str]:
        """Tenants whose account may have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def find(
        self, chain: KeyChain, root: Key, tokens: bytes, planned: Mapping[Key, tuple[Key, bytes]]
    ) -> tuple[Key, Chunk | None]:
        """The key of a chunk and the chunk under it, if any.

        A key taken by other tokens (a collision) is skipped and the next one is tried; `planned` holds root and tokens
        of planned chunks that are not in the index yet.
        """
        key = chain.chunk(root, tokens)
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
        """Whether a chunk has these tokens and this root."""
        return not self._verify or (chunk.root == root and chunk.tokens == tokens)

    def named(self, name_or_key: str | Key, salt: str | None, tenant: str) -> list[Chunk]:
        """The chunks of a tenant with this name, under one salt or (None) all, or the one with this key.

        Raises:
            UnknownChunk: no such chunk.
        """
        if isinstance(name_or_key, str):
            chunks = [self._chunks[key] for key in self._names.members((tenant, name_or_key))]
            found = [chunk for chunk in chunks if salt is None or chunk.salt == salt]
        else:
            chunk = self._chunks.get(name_or_key) if isinstance(name_or_key, bytes) else None
            found = [chunk] if chunk is not None and chunk.tenant == tenant else []
        if not found:
            shown = name_or_key.hex() if isinstance(name_or_key, bytes) else repr(name_or_key)[:80]
            raise UnknownChunk(
                f"no cached chunk is called {shown} among {self.account(tenant).num_chunks}; it may have been "
                "evicted: warm it again, and pin it to keep it"
            )
        return found

    def create(
        self,
        key: Key,
        root: Key,
        tokens: bytes,
        start: int,
        salt: str,
        tenant: str = "",
        *,
        identity: Key | None = None,
        shared: SharedStart[Chunk] | None = None,
    ) -> Chunk:
        """Creates a chunk to be computed, with blocks for all of its tokens; see `Chunk` for its fields.

        With `shared`, its first blocks are those of another chunk, in use now, which begins with the same tokens.

        Raises:
            OutOfBlocks: the pool has too few free blocks; nothing has changed.
        """
        assert key not in self._chunks and len(self._chunks) < self.max_chunks
        table = self._new_table(len(tokens) // TOKEN_BYTES, shared)
        now = self._clock()
        chunk = Chunk(key, root, tokens, start, salt, tenant, table, now, now, identity or key)
        self._chunks[key] = chunk
        if shared is not None:
            self.shared.share(shared, chunk)
            chunk.num_kept = chunk.num_computed = shared.num_blocks * self.pool.block_size
            self._await_start(shared.source, chunk)
        self.starts.add(chunk)
        self._count(chunk, 1, chunk.num_blocks - chunk.num_shared)
        return chunk

    def _await_start(self, source: Chunk, chunk: Chunk) -> None:
        """Makes a chunk wait for the kept tokens that the source of its first blocks has not computed yet."""
        while source.start_source is not None and chunk.num_kept <= source.num_kept:
            source = source.start_source
        if not source.is_ready or source.completed_step == self.unwritten_step:
            chunk.start_source = source
            self._dependents.add(source, chunk)

    def _end_wait(self, chunk: Chunk) -> None:
        if chunk.start_source is not None:
            self._dependents.discard(chunk.start_source, chunk)
            chunk.start_source = None

    def has_dependents(self, chunk: Chunk) -> bool:
        """Whether unfinished chunks share its first blocks, which were not complete when they were allocated."""
        return bool(self._dependents.members(chunk))

    def _new_table(self, num_tokens: int, shared: SharedStart[Chunk] | None) -> BlockTable:
        if shared is None:
            table = BlockTable(self.pool)
        else:
            block_ids = shared.source.block_ids[: shared.num_blocks]
            self.pool.retain(block_ids)
            table = BlockTable.adopt(self.pool, block_ids, shared.num_blocks * self.pool.block_size)
        try:
            table.append(num_tokens - table.num_tokens)
        except OutOfBlocks:
            table.release()
            raise
        return table

    def name(self, chunk: Chunk, name: str) -> None:
        """Adds a name; above `MAX_NAMES`, the oldest is dropped."""
        if name in chunk.names:
            return
        chunk.names = (*chunk.names, name)
        self._names.add((chunk.tenant, name), chunk.key)
        if len(chunk.names) > MAX_NAMES:
            self._unname(chunk, chunk.names[0])

    def acquire(self, chunk: Chunk) -> None:
        """Adds a reference to the chunk and to each block."""
        self._dequeue(chunk)
        self.pool.retain(chunk.block_ids)
        chunk.ref_count += 1
        chunk.last_used = self._clock()

    def release(self, chunk: Chunk, *, goes_on: bool = False) -> None:
        """Removes a reference to the chunk and its blocks; the last one of a deleted or abandoned chunk frees it.

        If its conversation goes on, it counts as just used for `SPARED_SECONDS`, unless too many of its tenant do.
        """
        assert chunk.ref_count > 0
        now = self._clock()
        if goes_on and not chunk.is_dropped:
            account = self._accounts[chunk.tenant]
            account.spare(chunk, now, now + SPARED_SECONDS, int(self._room(account) * _MAX_SPARED_SHARE))
        self.pool.release(chunk.block_ids)
        chunk.ref_count -= 1
        chunk.last_used = now
        if chunk in self._leaving and chunk.ref_count == 0:
            self._leaving.discard(chunk)
            self._free(chunk)
        self._enqueue(chunk)

    def begin_step(self, step: int) -> None:
        """Starts assembling a step."""
        self.unwritten_step = step

    def end_step(self) -> None:
        """Ends a step that was carried out, or of which all was abandoned that was not."""
        self.unwritten_step = -1
        for chunk in self._unwritten:
            self._end_wait(chunk)
        self._unwritten.clear()

    def complete(self, chunk: Chunk, step: int) -> None:
        """Marks a chunk as ready: its last token is computed."""
        assert chunk.state is ChunkState.COMPUTING and chunk.num_computed == chunk.num_tokens
        chunk.state = ChunkState.READY
        chunk.completed_step = step
        if step == self.unwritten_step:
            self._unwritten.append(chunk)
        else:
            self._end_wait(chunk)
        if chunk.codec:
            self.starts.discard(chunk)  # it is not exact, because it came from a lossy tier
        self._enqueue(chunk)
        self.pin_if_named(chunk)

    def abandon(self, chunk: Chunk) -> None:
        """Removes a chunk that was not (correctly) computed; its last release frees the blocks.

        Chunks that share its first blocks and are not written are abandoned, too.
        """
        abandoned = [chunk]
        while abandoned:
            chunk = abandoned.pop()
            if not chunk.is_abandoned:
                self._drop(chunk)
                self._end_wait(chunk)
                chunk.state = ChunkState.ABANDONED
                abandoned += self._dependents.members(chunk)

    def evict_one(self, account: TenantAccount | None = None) -> Chunk | None:
        """Evicts the first chunk of the queue, of all or of one account; returns it, or None if the queue is empty."""
        chunk = (account or self.total).first()
        if chunk is not None:
            self.evict(chunk)
        return chunk

    def evict(self, chunk: Chunk) -> None:
        """Evicts an unreferenced chunk."""
        assert chunk.ref_count == 0 and chunk.is_ready and not chunk.pinned
        if chunk.queue_entry is not None:
            self._evicted_rank = max(self._evicted_rank, chunk.queue_entry[0])
        self._accounts[chunk.tenant].num_evictions += 1
        try:
            self.on_evict(chunk)
        finally:  # an interrupt during the copy must not leave it indexed, but not queued
            self._drop(chunk)
            self.num_evictions += 1
            self._evicted[chunk.key] = None
            if len(self._evicted) > MAX_EVICTED:
                del self._evicted[next(iter(self._evicted))]

    def was_evicted(self, key: Key) -> bool:
        """Whether a chunk was one of the latest that were evicted."""
        return key in self._evicted

    def clear(self) -> None:
        """Drops all unreferenced chunks, pinned ones too, without callbacks."""
        for chunk in self.chunks():
            if not chunk.ref_count:
                self._drop(chunk)

    def trim(self, tenant: str) -> None:
        """Evicts idle chunks of a tenant until it is within its quota, or has none."""
        account = self.account(tenant)
        while not account.has_room(0) and self.evict_one(account) is not None:
            pass

    def delete(self, chunks: Iterable[Chunk], *, when_idle: bool = False) -> None:
        """Drops chunks, pinned or not; all of them or none.

        With `when_idle`, chunks in use are not found by new lookups, and their last release frees them.

        Raises:
            ChunkInUse: a request reads or computes one of them, and `when_idle` is off.
        """
        chosen = list(chunks)
        for chunk in chosen:
            if chunk.ref_count and not when_idle:
                label = next(iter(chunk.names), chunk.key.hex())
                raise ChunkInUse(
                    f"the chunk {label!r} is used by {chunk.ref_count} requests; delete it when they have ended"
                )
        for chunk in chosen:
            self._drop(chunk)
            self.on_delete(chunk)

    def set_pinned(self, chunk: Chunk, pinned: bool) -> None:
        """Pins or unpins a chunk; pinned chunks are not evicted."""
        if chunk.pinned != pinned:
            self._dequeue(chunk)
            self._note_pinned(chunk, pinned)
            self._enqueue(chunk)

    def pin_if_named(self, chunk: Chunk) -> None:
        """Pins a ready chunk with a pinned name, unless such pins take too much of its tenant's capacity."""
        account = self.account(chunk.tenant)
        if not chunk.is_ready or chunk.pinned or not account.pinned_names.cover(chunk.names):
            return
        if account.num_pinned_blocks + chunk.num_blocks <= _MAX_PINNED_SHARE * self._room(account):
            self.set_pinned(chunk, True)

    def _room(self, account: TenantAccount) -> int:
        """Blocks that a tenant can have."""
        room = self.pool.num_blocks
        return room if account.quota_blocks is None else min(account.quota_blocks, room)

    def set_quota(self, tenant: str, num_bytes: int | None) -> None:
        """Sets or removes a limit on the blocks of a tenant; evicts idle chunks as far as needed."""
        self._changed.add(tenant)
        account = self.open(tenant)
        account.quota_bytes = num_bytes
        account.quota_blocks = None if num_bytes is None else num_bytes // self.bytes_per_block
        self.trim(tenant)
        self.close(tenant)

    def set_priority(self, chunk: Chunk, priority: float) -> None:
        """Changes a chunk's priority; only the policy `priority` reads it."""
        self._dequeue(chunk)
        chunk.priority = priority
        self._enqueue(chunk)

    def check_invariants(self) -> None:
        """Checks index, names, queues, accounts and ref counts against each other."""
        chunks = self._chunks.values()
        for key, chunk in self._chunks.items():
            assert chunk.key == key and not chunk.is_abandoned and not chunk.is_dropped
            assert chunk.num_tokens == len(chunk.tokens) // TOKEN_BYTES
            assert (chunk.num_computed == chunk.num_tokens) == chunk.is_ready
            assert all(key in self._names.members((chunk.tenant, name)) for name in chunk.names)
        references: Counter[BlockId] = Counter()
        for chunk in (*chunks, *self._leaving):
            assert (chunk.queue_entry is not None) == chunk.is_evictable
            assert chunk.num_kept <= chunk.num_computed and chunk.num_kept < chunk.num_tokens
            if (source := chunk.start_source) is not None:
                assert (chunk.state is ChunkState.COMPUTING or chunk in self._unwritten) and not source.is_abandoned
                num_blocks = 0 if source.is_ready else chunk.num_kept // self.pool.block_size
                assert list(source.block_ids[:num_blocks]) == list(chunk.block_ids[:num_blocks])
            assert not chunk.lacks_start or chunk.num_computed == chunk.num_kept
            chunk.table.check_invariants()
            for block_id in chunk.block_ids:
                references[block_id] += 1 + chunk.ref_count
        assert all(self.pool.reference_count(block_id) == count for block_id, count in references.items())
        self.shared.check_invariants((*chunks, *self._leaving))
        assert set(self.starts) <= {chunk for chunk in chunks if not chunk.codec}
        waiting = {chunk for chunk in (*chunks, *self._leaving) if chunk.start_source is not None}
        assert waiting == {chunk for source in self._dependents for chunk in self._dependents.members(source)}
        for chunk in self._leaving:
            assert chunk.is_dropped and chunk.ref_count > 0 and not chunk.pinned and not chunk.names
        self.same_text.check_invariants(self._chunks)
        assert len(self._chunks) <= self.max_chunks
        assert sum(len(self._names.members(place)) for place in self._names) == sum(len(c.names) for c in chunks)
        self._check_account(self.total, [*chunks], [*self._leaving])
        assert {chunk.tenant for chunk in (*chunks, *self._leaving)} <= self._accounts.keys()
        for tenant, account in self._accounts.items():
            present, leaving = ([c for c in group if c.tenant == tenant] for group in (chunks, self._leaving))
            self._check_account(account, present, leaving)
            assert account.has_room(0) or not account.num_idle, "what is idle above the quota has left"
            assert not account.is_closed

    def _check_account(self, account: TenantAccount, present: list[Chunk], leaving: list[Chunk]) -> None:
        idle = [chunk for chunk in present if chunk.is_evictable]
        pinned = [chunk for chunk in present if chunk.pinned]
        assert set(account.in_order()) == set(idle) and len(account.in_order()) == account.num_idle
        assert account.num_chunks == len(present) and account.num_pinned == len(pinned)
        held = {block_id for chunk in (*present, *leaving) for block_id in chunk.block_ids}
        others = [chunk for chunk in (*present, *leaving) if not chunk.is_evictable]
        assert account.num_blocks == len(held)
        assert account.num_idle_blocks == len(held.difference(*(chunk.block_ids for chunk in others)))
        assert account.num_spared_blocks == sum(chunk.num_blocks for chunk in present if chunk.spared_until) or (
            account is self.total
        )
        assert account.num_pinned_blocks == len({block_id for chunk in pinned for block_id in chunk.block_ids})

    def _both(self, chunk: Chunk) -> tuple[TenantAccount, TenantAccount]:
        """The accounts of a chunk, for updates."""
        self._changed.add(chunk.tenant)
        return self.total, self.open(chunk.tenant)

    def _count(self, chunk: Chunk, num_chunks: int, num_blocks: int) -> None:
        for account in self._both(chunk):
            account.num_chunks += num_chunks
            account.num_blocks += num_blocks
        self.close(chunk.tenant)

    def _enqueue(self, chunk: Chunk) -> None:
        if chunk.is_evictable:
            progress = chunk.num_computed / chunk.num_tokens
            candidate = Candidate(
                max(chunk.last_used, chunk.spared_until),
                chunk.num_tokens,
                chunk.priority,
                progress,
                chunk.hits,
                chunk.compute_ms / 1e3,
                chunk.num_blocks * self.bytes_per_block,
                self._evicted_rank,
            )
            chunk.queue_entry = (self._policy.rank(candidate), next(self._numbers), chunk)
            num_blocks = self._set_idle(chunk, 1)
            for account in self._both(chunk):
                account.push(chunk, num_blocks)
            self.trim(chunk.tenant)

    def _dequeue(self, chunk: Chunk) -> None:
        if chunk.queue_entry is not None:
            num_blocks = self._set_idle(chunk, -1)
            for account in self._both(chunk):
                account.remove(chunk, num_blocks)

    def _set_idle(self, chunk: Chunk, sign: int) -> int:
        """Records whether a chunk is idle; returns how many blocks this concerns."""
        return self.shared.set_idle(chunk, sign) if chunk.num_shared else chunk.num_blocks

    def _note_pinned(self, chunk: Chunk, pinned: bool) -> None:
        chunk.pinned = pinned
        sign = 1 if pinned else -1
        num_blocks = self.shared.set_pinned(chunk, sign)
        for account in self._both(chunk):
            account.note_pin(sign, num_blocks)

    def _unname(self, chunk: Chunk, name: str) -> None:
        chunk.names = tuple(other for other in chunk.names if other != name)
        self._names.discard((chunk.tenant, name), chunk.key)

    def _drop(self, chunk: Chunk) -> None:
        """Removes a chunk from the index; its blocks are freed now, or with the last release. Safe to call twice."""
        if chunk.is_dropped:
            return
        self._dequeue(chunk)
        self._accounts[chunk.tenant].end_sparing(chunk)
        chunk.is_dropped = True
        if chunk.pinned:
            self._note_pinned(chunk, False)
        for name in chunk.names:
            self._unname(chunk, name)
        self.same_text.discard(chunk)
        self.starts.discard(chunk)
        del self._chunks[chunk.key]
        self._count(chunk, -1, 0)
        if chunk.ref_count == 0:
            self._free(chunk)
        else:
            self._leaving.add(chunk)

    def _free(self, chunk: Chunk) -> None:
        try:
            self.on_free(chunk)
        finally:  # an interrupt must not leak the blocks
            changed = self.shared.free(chunk)
            chunk.table.release()
            for account in self._both(chunk):
                account.num_idle_blocks += changed.idle
            self._count(chunk, 0, -changed.total)
