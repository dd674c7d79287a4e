"""The KV cache: plans prompts, and keeps pools, tables and caches in step with the engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from kvmosaic.cache.allocate import Allocator, CapacityCheck
from kvmosaic.cache.allocation import Allocation, SpanAllocation, freed_request_blocks
from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.block_table import BlockCopy, SavedState, StateProgress
from kvmosaic.cache.chunk import Chunk, ChunkState
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import Key, KeyChain, encode_tokens
from kvmosaic.cache.plan import CacheLookup, Plan
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.statistics import BlockMap, ChunkCacheStats, Counters, snapshot, states_of
from kvmosaic.cache.tenant_chunks import TenantChunks
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import ChunkCacheFull, KVMosaicError, OutOfBlocks
from kvmosaic.eviction import check_priority, choose
from kvmosaic.layout import Layout, arrange
from kvmosaic.prompt import Prompt


class KVCache(TenantChunks):
    """Facade for KV cache planning: plans and allocations; names, pins and quotas are in its base class. No tensors.

        plan = kv_cache.plan(layout)                     what would be reused, computed, waited for
        allocation = kv_cache.allocate(plan)             blocks for all of it, all or nothing
        kv_cache.begin_step()
        kv_cache.advance(allocation, 1, 512)             span 1 gets 512 tokens in the step being assembled
        kv_cache.end_step()                              they are computed
        copies = kv_cache.append_slots(allocation, [t])  slots for the keys and values of a sampled token
        other = kv_cache.fork(allocation)                a second answer to the same prompt
        kv_cache.release(allocation)                     always, in the end

    An operation that raises leaves everything as it was. Not thread-safe: one loop makes all calls, without locks.
    """

    def __init__(
        self,
        fingerprint: str,
        config: ChunkCacheConfig,
        *,
        request_blocks: int,
        chunk_blocks: int,
        prefix_caching: bool = True,
        bytes_per_block: int = 1,
        max_states: int = 0,
        repaired_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes empty pools and caches.

        Args:
            fingerprint: identifies the model and everything else that determines keys and values.
            config: block size, limits, hash and eviction.
            request_blocks: size of the pool for prefixes, questions and answers.
            chunk_blocks: size of the pool for chunks.
            prefix_caching: whether blocks outside chunks are cached for later requests.
            bytes_per_block: of all layers together, for quotas and usage.
            max_states: for a model with states, how many of them the prefix cache may hold; 0: the model has none.
            repaired_tokens: for such a model, how many first tokens of chunks may be repaired.
            clock: monotonic seconds.
        """
        policy = choose(config.eviction)
        verify = config.verify_tokens or config.hash_algorithm != "sha256"
        self.fingerprint = fingerprint
        self.config = config
        self.request_pool = BlockPool("request", request_blocks, config.block_size)
        self.chunk_pool = BlockPool("chunk_cache", chunk_blocks, config.block_size)
        self._prefix_caching = prefix_caching
        self._counters = Counters()
        self.has_states = max_states > 0
        """Whether the model has layers with a state."""
        self.repaired_tokens = repaired_tokens if self.has_states else 0
        """How many first tokens of chunks can be repaired: what the rest of each does to a state is kept, too."""
        self._prefix = PrefixCache(
            self.request_pool, policy, clock, bytes_per_block=bytes_per_block, verify=verify, max_states=max_states
        )
        chunks = ChunkIndex(
            self.chunk_pool,
            policy,
            clock,
            max_chunks=config.max_chunks,
            bytes_per_block=bytes_per_block,
            verify=verify,
        )
        super().__init__(chunks, clock)
        self._lookup = CacheLookup(
            self._chunks,
            self._prefix if prefix_caching else None,
            self._counters,
            clock,
            has_states=self.has_states,
        )
        self._capacity = CapacityCheck(self.request_pool, self._prefix, self._chunks)
        self._allocator = Allocator(self._prefix, self._chunks, self._capacity, self._counters)
        self._step = 0

    def plan(self, layout: Layout, salt: str = "", tenant: str = "") -> Plan:
        """Finds what would be reused, computed or waited for. Changes only the number and time of lookups."""
        return self._lookup.plan(layout, salt, tenant, self._chain(salt, tenant, layout))

    def allocate(
        self, plan: Plan, *, priority: float = 0.5, again: bool = False, loaded: Collection[Key] = ()
    ) -> Allocation:
        """Acquires everything that is reused and allocates everything else; all of it or nothing.

        The plan is revalidated: what was evicted since is computed, what was cached since is reused. Carry out the
        allocation's `copies` before anything of the next step is written.

        Args:
            plan: what to allocate.
            priority: of the sequence, 0 to 1: how long the policy `priority` keeps its blocks outside chunks.
            again: whether the prompt was allocated before, in another layout: its hits are not counted twice.
            loaded: keys of chunks that `load` is about to complete, so that they wait for no other chunk. Where
                there is no room otherwise, one of them may have to wait, and is to be computed.

        Raises:
            InvalidConfig: a priority outside its range.
            OutOfBlocks: running requests hold too many blocks now; retry when one has ended. QuotaInUse: they are of
                this tenant and fill its quota.
            ChunkCacheFull: the prompt's chunks can never fit next to the pinned ones. QuotaExceeded: in the quota.
            RequestTooLarge: the rest of the prompt can never fit.
        """
        started = self._clock()
        check_priority(priority, "a sequence")
        found = self._lookup.revalidate(plan, loaded)
        if found is None:
            plan = self.plan(plan.layout, plan.salt, plan.tenant)
            found = self._lookup.revalidate(plan, loaded)
            assert found is not None, "a new plan passes over keys that are taken"
        allocation = self._allocator.allocate(
            plan, found, self._chain(plan.salt, plan.tenant, plan.layout), again=again
        )
        allocation.priority = priority
        if allocation.copies:
            allocation.last.computed_step = self._step  # it is written with everything else of the step
        self._counters.allocates += 1
        self._counters.allocate_seconds += self._clock() - started
        return allocation

    def sequence(self, token_ids: Sequence[int], salt: str = "") -> CachedSequence:
        """Plans and allocates one text of tokens, as an object; see `CachedSequence`.

        Raises:
            OutOfBlocks, RequestTooLarge: as `allocate`.
        """
        return CachedSequence(self, self.allocate(self.plan(arrange(Prompt.plain(token_ids)), salt)))

    def why_blocked(self, plan: Plan) -> OutOfBlocks | None:
        """Why a plan cannot be allocated now, but can after other requests end; None if it can now, or never."""
        found = self._lookup.revalidate(plan)
        assert found is not None, "the plan is of this moment"
        try:
            self._capacity.fit(plan, found)
        except OutOfBlocks as error:
            return error
        except KVMosaicError:
            return None
        return None

    def num_too_large(self, layout: Layout, salt: str = "", tenant: str = "") -> int | None:
        """Blocks of the chunks of a prompt, if they could never be in the cache together; None if they could."""
        chunks = [span for span in layout.spans if span.is_chunk]
        sizes = [self.chunk_pool.blocks_for(span.num_tokens) for span in chunks]
        if self._capacity.fits_surely(tenant, len(sizes), sum(sizes)):
            return None
        plan = self.plan(layout, salt, tenant)
        found = self._lookup.revalidate(plan)
        assert found is not None, "the plan is of this moment"
        try:
            self._capacity.check_chunks(plan, found)
        except ChunkCacheFull:
            return self._capacity.num_chunk_blocks(plan, found)
        return None

    def begin_step(self) -> None:
        """Starts assembling a step: `rollback_step` undoes what was advanced since this call."""
        self._step += 1
        self._prefix.begin_step(self._step)
        self._chunks.begin_step(self._step)

    def end_step(self) -> None:
        """Ends a step that was carried out: what it computed may be copied from now on."""
        self._prefix.end_step()
        self._chunks.end_step()

    def advance(self, allocation: Allocation, span_index: int, num_tokens: int) -> StateProgress | None:
        """Marks the next `num_tokens` tokens of a span as computed, by the step being assembled at the latest.

        Registers full blocks with the prefix cache, a closed span's last block too; a complete chunk becomes ready.

        Returns:
            For models with states, from where they continue and where their states go.
        """
        assert not allocation.is_released and not allocation.is_forgotten
        span = allocation.spans[span_index]
        assert 0 <= num_tokens <= span.num_tokens - span.num_computed, "no more tokens than there are"
        parts = allocation.layout.spans[span_index].parts
        progress = self._progress(span, num_tokens, parts) if self.has_states else None
        if (chunk := span.chunk) is not None:
            assert span.is_owner and chunk.state is ChunkState.COMPUTING, "a chunk is computed by its owner, once"
            assert not chunk.lacks_start, "the chunk whose first blocks it shares is computed before"
            chunk.num_computed += num_tokens
            self._counters.computed_chunk_tokens += num_tokens
            if chunk.num_computed == chunk.num_tokens:
                chunk.saved_state = span.state
                self._chunks.complete(chunk, self._step)
            return progress
        first = span.computed
        span.computed += num_tokens
        span.computed_step = self._step
        if self._prefix_caching:
            span.register(self._prefix, allocation.chain, self._step)
            if progress is not None and (num_tokens > 1 or span.is_closed):
                states = [(first + count, state) for count, state in progress.saves if not state.is_passing]
                span.give_states(self._prefix, states, self._step)
        return progress

    def _progress(self, span: SpanAllocation, num_tokens: int, parts: Sequence[int]) -> StateProgress:
        """The states of the next tokens of a span: after the last one, and where another one may continue.

        That is at the last border of a block, and in front of each of the parts that repaired tokens have; in a chunk,
        after the first tokens, that may be repaired.
        """
        before, first, last = span.state, span.num_computed, span.num_computed + num_tokens
        is_chunk, last_border, saves = span.chunk is not None, last - last % self.request_pool.block_size, []
        borders = {self.repaired_tokens, last} if is_chunk else {last_border, *parts, last}
        for border in sorted({border for border in borders if first < border <= last} | {last}):
            has_rest = self.repaired_tokens and (border > self.repaired_tokens or border == span.num_tokens)
            rest = SavedState(has_map=True) if is_chunk and has_rest else None
            saves.append((border - first, SavedState(is_chunk, rest, border not in (last, last_border))))
        span.state = saves[-1][1]
        return StateProgress(before, tuple(saves))

    def load(self, allocation: Allocation, span_index: int) -> None:
        """Marks a chunk that this allocation owns as loaded from a tier into its blocks instead of computed."""
        span = allocation.spans[span_index]
        chunk = span.chunk
        assert chunk is not None and span.is_owner, "a chunk is loaded by its owner"
        assert chunk.num_computed == chunk.num_kept, "what is begun is computed to its end"
        self._counters.hits += 1  # counted as a miss when it was allocated
        self._counters.loaded_chunks += 1
        self._counters.loaded_chunk_tokens += chunk.num_tokens - chunk.num_kept
        chunk.num_computed = chunk.num_tokens
        self._chunks.complete(chunk, self._step)

    def notify(
        self,
        *,
        evicted: Callable[[Chunk], None],
        deleted: Callable[[Chunk], None],
        freed: Callable[[Chunk], None],
    ) -> None:
        """Sets callbacks: `evicted` gets chunks evicted for capacity, while their blocks still hold them.

        `deleted` gets chunks deleted by name or key; `freed` gets all chunks right before their blocks are freed, for
        any reason. None of them may raise.
        """
        self._chunks.on_evict, self._chunks.on_delete, self._chunks.on_free = evicted, deleted, freed

    def append_slots(
        self, allocation: Allocation, token_ids: Sequence[int], *, is_private: bool = False
    ) -> list[BlockCopy]:
        """Appends answer tokens, yet to be computed, to the last span; returns the copies to carry out first.

        With `is_private`, neither these tokens nor later ones are registered with the prefix cache: they do not see all
        tokens before them.

        Raises:
            OutOfBlocks: all blocks of the request pool are in use; nothing has changed.
        """
        assert not allocation.is_released and not allocation.is_forgotten
        span = allocation.last
        assert not span.is_closed, "only a question or a plain prompt grows"
        tokens = encode_tokens(token_ids)
        self._capacity.make_request_blocks(span.table.blocks_to_append(len(token_ids)))
        copies = span.table.append(len(token_ids))
        span.is_unregistrable = span.is_unregistrable or is_private
        if not span.is_unregistrable:
            span.tokens += tokens
        return copies

    def evict_window(self, allocation: Allocation, num_sinks: int, oldest: int) -> None:
        """Frees the blocks of the last span between its sinks and the oldest visible token, numbered as in the text.

            before    [ s s s . ] [ . . . . ] [ . . . . ] [ . o w w ] [ w . . . ]      o: the oldest still visible
            after     [ s s s . ] [ . o w w ] [ w . . . ]                              num_left is 8 more

        Frees whole blocks only. Blocks in the prefix cache stay there, and are evictable after their last release.
        """
        assert not allocation.is_released and not allocation.is_forgotten
        span, size = allocation.last, self.request_pool.block_size
        first = self.request_pool.blocks_for(num_sinks)
        count = (oldest - span.num_left) // size - first
        if count <= 0:
            return
        span.table.cut(first, count)
        span.num_left += count * size
        span.computed -= count * size
        span.is_unregistrable = True
        if first * size + span.num_left >= len(span.entries) * size:
            self._prefix.release(span.entries[first:], allocation.holder)
            del span.entries[first:]

    def skip_tokens(self, allocation: Allocation, num_tokens: int) -> None:
        """Skips so many tokens in the last span: the next ones are numbered as if those came before them."""
        assert not allocation.is_released and not allocation.is_forgotten
        allocation.last.num_left += num_tokens
        allocation.last.is_unregistrable = True

    def holds_copies(self, allocation: Allocation) -> bool:
        """Whether it has private copies of blocks in the prefix cache, which a new allocation would share.

        That happens when requests with equal tokens run concurrently: only the first one's blocks are registered.
        """
        return any(
            entry.block_id != block_id
            for span in allocation.spans
            if not span.num_left  # a rolled window has other blocks after its sinks
            for entry, block_id in zip(span.entries, span.table.block_ids, strict=False)
        )

    def fork(self, allocation: Allocation) -> Allocation:
        """A second holder of the same blocks, for another answer; the first to write copies the last block.

        All tokens must be computed, because a block is written by one holder only.
        """
        assert not allocation.is_released and not allocation.is_stale
        assert all(span.is_ready for span in allocation.spans), "a sequence is forked when its prompt is computed"
        spans = [span.fork(self._prefix) for span in allocation.spans]
        for chunk in allocation.held_chunks():
            self._chunks.acquire(chunk)
        return Allocation(
            allocation.layout,
            allocation.salt,
            allocation.tenant,
            spans,
            allocation.chain,
            priority=allocation.priority,
        )

    def release(self, allocation: Allocation, *, goes_on: bool = False) -> None:
        """Releases everything; a second call does nothing.

        If the conversation goes on, as after the call of a tool, its documents count as just used for a while.

        The computed tokens of its last span stay registered, for a conversation that goes on. A chunk that it owns and
        has not completed is abandoned, so that waiting requests plan again.
        """
        if allocation.is_released:
            return
        allocation.is_released = True
        last = allocation.last
        is_written = last.computed_step != self._prefix.unwritten_step or last.computed_step < 0
        if self._prefix_caching and is_written and last.chunk is None and not allocation.is_stale:
            last.register_tail(self._prefix, allocation.chain, self._step)
            if last.state is not None and last.state.value is not None:
                last.give_states(self._prefix, [(last.computed, last.state)], self._step)
        holder = allocation.holder
        for span in allocation.spans:
            if span.chunk is None:
                span.table.release()
                self._prefix.release(span.entries, holder)
            elif span.is_owner and not span.chunk.is_ready:
                self._chunks.abandon(span.chunk)
        for chunk in allocation.held_chunks():
            self._chunks.release(chunk, goes_on=goes_on)

    def rollback_step(self, allocation: Allocation) -> None:
        """Undoes what this allocation registered in the current step, because the step failed.

        Prefix blocks that it registered since `begin_step`, and all that was computed after them, are dropped; chunks
        that it completed since then, or has not completed, are abandoned. Only `release` is allowed afterwards. Call it
        for every allocation that took part in the step; other readers see `is_stale`.
        """
        allocation.is_forgotten = True
        for span in allocation.spans:
            if span.registered_step == self._step:
                for entry in span.given:
                    if entry.state is not None:
                        entry.state.is_lost = True
                    self._prefix.states.take(entry)
                for entry in span.registered:
                    self._prefix.drop(entry)
            chunk = span.chunk
            if chunk is not None and span.is_owner and not (chunk.is_ready and chunk.completed_step < self._step):
                self._chunks.abandon(chunk)

    def record_compute(self, chunk: Chunk, milliseconds: float) -> None:
        """Records the compute time of a chunk, without its kept tokens."""
        chunk.compute_ms += milliseconds * chunk.num_tokens / (chunk.num_tokens - chunk.num_kept)
        self._counters.computes += 1
        self._counters.compute_ms += milliseconds

    def block_map(self) -> BlockMap:
        """The current state of every block of both pools; one pass over them."""
        pinned = (block_id for chunk in self._chunks.chunks() if chunk.pinned for block_id in chunk.block_ids)
        return BlockMap(
            request=states_of(self.request_pool, kept=self._prefix.block_ids()),
            chunk_cache=states_of(self.chunk_pool, kept=None, pinned=pinned, holders=self._chunks.shared.num_holders()),
        )

    def freed_by(self, allocations: Sequence[Allocation]) -> dict[str, int]:
        """By pool: the blocks that would be free or evictable if all of these allocations were released.

        Blocks with other holders are not counted, nor are pinned chunks.
        """
        holders = Counter(chunk for allocation in allocations for chunk in allocation.held_chunks())
        chunks = (chunk for chunk, count in holders.items() if chunk.ref_count == count and not chunk.pinned)
        return {
            self.request_pool.name: freed_request_blocks(allocations, self.request_pool),
            self.chunk_pool.name: self._chunks.shared.num_freed_by(chunks),
        }

    def reset(self) -> bool:
        """Drops everything unreferenced, pinned chunks too; returns whether both pools are empty then."""
        self._prefix.clear()
        self._chunks.clear()
        pools = (self.request_pool, self.chunk_pool)
        return all(pool.num_free == pool.num_blocks for pool in pools)

    @property
    def num_spare_blocks(self) -> int:
        """Blocks of the request pool that are free or evictable."""
        return self.request_pool.num_free + self._prefix.num_idle

    def used_blocks(self) -> tuple[list[BlockId], list[BlockId]]:
        """Blocks of the request pool and of the chunk pool with at least one reference."""
        return _used(self.request_pool), _used(self.chunk_pool)

    def statistics(self) -> ChunkCacheStats:
        """A snapshot of counters and fill levels."""
        return snapshot(self._counters, self._chunks, self._prefix, self.request_pool)

    def check_invariants(self) -> None:
        """Checks pools, prefix cache and chunk index (slow; for tests)."""
        self.request_pool.check_invariants()
        self.chunk_pool.check_invariants()
        self._prefix.check_invariants()
        self._chunks.check_invariants()

    def _chain(self, salt: str, tenant: str, layout: Layout) -> KeyChain:
        algorithm, adapter = self.config.hash_algorithm, layout.adapter.key_digest
        return KeyChain(self.fingerprint, salt, algorithm, tenant=tenant, adapter=adapter, is_ordered=self.has_states)


def _used(pool: BlockPool) -> list[BlockId]:
    return [block_id for block_id in map(BlockId, range(pool.num_blocks)) if pool.reference_count(block_id)]


class CachedSequence:
    """A text of tokens in a `KVCache`, for an engine that adds tokens one by one.

    sequence = kv_cache.sequence([1, 2, 3])   shares the blocks of what is cached; carry out `copies` first
    sequence.slots                            write the keys and values of the tokens that are missing here
    sequence.computed()                       they are written, and may be shared
    copies = sequence.append(4)               blocks to copy before the keys and values of token 4 are written
    other = sequence.fork()                   the same blocks, for another continuation
    sequence.free()                           its blocks stay cached until they are evicted
    """

    def __init__(self, kv_cache: KVCache, allocation: Allocation) -> None:
        self._kv_cache = kv_cache
        self.allocation = allocation
        self.copies = allocation.copies

    def __len__(self) -> int:
        """Count of its tokens."""
        return self.allocation.last.num_tokens

    @property
    def block_ids(self) -> Sequence[BlockId]:
        """Its blocks, in the order of its tokens."""
        return self.allocation.last.table.block_ids

    @property
    def num_computed(self) -> int:
        """Count of its first tokens whose keys and values are in the cache."""
        return self.allocation.last.num_computed

    @property
    def slots(self) -> list[int]:
        """For each token that is yet to be computed, the slot of its keys and values."""
        return self.allocation.last.table.slots(self.num_computed, len(self) - self.num_computed)

    def computed(self) -> None:
        """Marks all its tokens as computed."""
        self._kv_cache.begin_step()
        self._kv_cache.advance(self.allocation, 0, len(self) - self.num_computed)
        self._kv_cache.end_step()

    def append(self, *token_ids: int) -> list[BlockCopy]:
        """Adds tokens that are yet to be computed; see `KVCache.append_slots`."""
        return self._kv_cache.append_slots(self.allocation, token_ids)

    def fork(self) -> CachedSequence:
        """A second sequence of the same tokens and blocks; all tokens must be computed."""
        return CachedSequence(self._kv_cache, self._kv_cache.fork(self.allocation))

    def free(self) -> None:
        """Releases its blocks; a second call does nothing."""
        self._kv_cache.release(self.allocation)
