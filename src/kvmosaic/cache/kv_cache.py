"""The KV cache: plans prompts, and keeps pools, tables and caches in step with what the engine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from kvmosaic.cache.allocation import Allocation
from kvmosaic.cache.allocator import Allocator
from kvmosaic.cache.block_map import BlockMap, states_of
from kvmosaic.cache.block_pool import BlockId, BlockPool
from kvmosaic.cache.block_table import BlockCopy
from kvmosaic.cache.capacity_check import CapacityCheck
from kvmosaic.cache.chunk import Chunk, ChunkState
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import Key, KeyChain, encode_tokens
from kvmosaic.cache.lookup import CacheLookup
from kvmosaic.cache.plan import Plan
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.statistics import ChunkCacheStats, Counters, snapshot
from kvmosaic.cache.tenant_account import TenantUsage
from kvmosaic.cache.tree import PrefixTree, TreeLimits
from kvmosaic.cache.tree_view import Origins, TreeView
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidConfig, KVMosaicError, OutOfBlocks
from kvmosaic.eviction import choose
from kvmosaic.layout import Layout

MAX_QUOTA_BYTES = 2**50


class KVCache:
    """Everything the engine needs to know about memory, without a tensor.

        plan = kv_cache.plan(layout)               what would be reused, computed, waited for
        allocation = kv_cache.allocate(plan)         room for all of it, all or nothing
        kv_cache.begin_step()
        kv_cache.advance(allocation, 1, 512)       span 1 gets 512 tokens in the step being assembled
        kv_cache.end_step()                        they are computed
        copies = kv_cache.extend(allocation, [t])  a sampled token: room for its keys and values
        other = kv_cache.fork(allocation)          a second answer to the same prompt
        kv_cache.release(allocation)               always, in the end

    An operation that raises leaves everything as it was. One loop calls all of this; there are no locks.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes empty pools and caches.

        Args:
            fingerprint: identifies the model and everything else that decides keys and values.
            config: block size, limits, hash and eviction.
            request_blocks: size of the pool for prefixes, questions and answers.
            chunk_blocks: size of the pool for chunks.
            prefix_caching: whether blocks outside chunks are kept for later requests.
            bytes_per_block: of all layers together, for quotas and usage.
            clock: seconds that never run backwards.
        """
        policy = choose(config.eviction)
        verify = config.verify_tokens or config.hash_algorithm != "sha256"
        self.fingerprint = fingerprint
        self.config = config
        self.bytes_per_block = bytes_per_block
        self.request_pool = BlockPool("request", request_blocks, config.block_size)
        self.chunk_pool = BlockPool("chunk_cache", chunk_blocks, config.block_size)
        self._prefix_caching = prefix_caching
        self._clock = clock
        self._counters = Counters()
        self._prefix = PrefixCache(self.request_pool, policy, clock, verify=verify)
        self._chunks = ChunkIndex(self.chunk_pool, policy, clock, max_chunks=config.max_chunks, verify=verify)
        self._lookup = CacheLookup(self._chunks, self._prefix if prefix_caching else None, self._counters, clock)
        self._room = CapacityCheck(self.request_pool, self._prefix, self._chunks)
        self._allocator = Allocator(self._prefix, self._chunks, self._room, self._counters)
        self._origins = Origins()
        self._usages: Mapping[str, TenantUsage] = {}
        self._step = 0

    def plan(self, layout: Layout, salt: str = "", tenant: str = "") -> Plan:
        """What would be reused, computed or waited for. Changes nothing but the number and time of lookups."""
        return self._lookup.plan(layout, salt, tenant, self._chain(salt, tenant))

    def allocate(self, plan: Plan, *, again: bool = False) -> Allocation:
        """Holds everything that is reused and makes room for everything that is not; all of it or nothing.

        What the plan found is looked up again: what was evicted since is computed, what came to be cached is used.
        The allocation's `copies` are to be carried out before anything of the next step is written.

        Args:
            plan: what to allocate.
            again: whether the prompt was allocated before, in another layout: what it found then is not counted twice.

        Raises:
            OutOfBlocks: running requests hold too much right now; try again when one has ended. QuotaInUse: they are
                of this tenant, and hold what its quota allows.
            ChunkCacheFull: the prompt's chunks can never fit (pinned ones stay). QuotaExceeded: not into the quota.
            RequestTooLarge: the rest of the prompt can never fit.
        """
        started = self._clock()
        found = self._lookup.revalidate(plan)
        if found is None:
            plan = self.plan(plan.layout, plan.salt, plan.tenant)
            found = self._lookup.revalidate(plan)
            assert found is not None, "a new plan passes over keys that are taken"
        allocation = self._allocator.allocate(plan, found, self._chain(plan.salt, plan.tenant), again=again)
        self._origins.note(plan)
        if allocation.copies:
            allocation.last.computed_step = self._step  # it is written with everything else of the step
        self._counters.allocates += 1
        self._counters.allocate_seconds += self._clock() - started
        return allocation

    def why_blocked(self, plan: Plan) -> OutOfBlocks | None:
        """Why a plan cannot be allocated now, though it can when others have ended; None if it can now, or never."""
        found = self._lookup.revalidate(plan)
        assert found is not None, "the plan is of this moment"
        for here in found:
            here.source, here.num_copied = None, 0  # blocks are copied only where there is room for it
        try:
            self._room.check(plan, found)
        except OutOfBlocks as error:
            return error
        except KVMosaicError:
            return None
        return None

    def begin_step(self) -> None:
        """Says that a new step is being assembled: `forget` undoes what was advanced since the last call."""
        self._step += 1
        self._prefix.begin_step(self._step)

    def end_step(self) -> None:
        """Says that the step has been carried out: what it computed may be copied from now on."""
        self._prefix.end_step()

    def advance(self, allocation: Allocation, span_index: int, num_tokens: int) -> None:
        """Notes that the next `num_tokens` tokens of a span are computed, or will be by the step being assembled.

        Full blocks become known to the prefix cache, a closed span's last block too, and a complete chunk is ready.
        """
        assert not allocation.is_released and not allocation.is_forgotten
        span = allocation.spans[span_index]
        assert 0 <= num_tokens <= span.num_tokens - span.num_computed, "no more tokens than there are"
        if (chunk := span.chunk) is not None:
            assert span.is_owner and chunk.state is ChunkState.COMPUTING, "a chunk is computed by its owner, once"
            chunk.num_computed += num_tokens
            self._counters.computed_chunk_tokens += num_tokens
            if chunk.num_computed == chunk.num_tokens:
                self._chunks.complete(chunk, self._step)
            return
        span.computed += num_tokens
        span.computed_step = self._step
        if self._prefix_caching:
            span.register(self._prefix, allocation.chain, self._step)

    def load(self, allocation: Allocation, span_index: int) -> None:
        """Notes that a chunk which this allocation owns was not computed, but copied into its blocks from a tier."""
        span = allocation.spans[span_index]
        chunk = span.chunk
        assert chunk is not None and span.is_owner and not chunk.num_computed, "what is begun is computed to its end"
        chunk.num_computed = chunk.num_tokens
        self._counters.hits += 1  # counted as a miss when it was allocated
        self._counters.loaded_chunks += 1
        self._counters.loaded_chunk_tokens += chunk.num_tokens
        self._chunks.complete(chunk, self._step)

    def notify(
        self,
        *,
        evicted: Callable[[Chunk], None],
        deleted: Callable[[Chunk], None],
        freed: Callable[[Chunk], None],
    ) -> None:
        """Has chunks that leave to make room shown to `evicted`, while their blocks still hold them.

        Those that are deleted, by name or key, are shown to `deleted`, and all whose blocks are given back, for
        whatever reason, to `freed`, just before that. None of them may raise.
        """
        self._chunks.on_evict, self._chunks.on_delete, self._chunks.on_free = evicted, deleted, freed

    def append_slots(
        self, allocation: Allocation, token_ids: Sequence[int], *, is_private: bool = False
    ) -> list[BlockCopy]:
        """Grows the last span by answer tokens, which are then to be computed; returns the copies to carry out first.

        With `is_private`, neither these tokens nor later ones become known to the prefix cache: they do not see all
        that is before them.

        Raises:
            OutOfBlocks: the request pool is full of things in use; nothing has changed.
        """
        assert not allocation.is_released and not allocation.is_forgotten
        span = allocation.last
        assert not span.is_closed, "only a question or a plain prompt grows"
        tokens = encode_tokens(token_ids)
        self._room.make_request_blocks(span.table.blocks_to_append(len(token_ids)))
        copies = span.table.append(len(token_ids))
        span.is_unregistrable = span.is_unregistrable or is_private
        if not span.is_unregistrable:
            span.tokens += tokens
        return copies

    def evict_window(self, allocation: Allocation, num_sinks: int, oldest: int) -> None:
        """Gives back the blocks of the last span that lie between its sinks and a token, numbered as in the text.

            before    [ s s s . ] [ . . . . ] [ . . . . ] [ . o w w ] [ w . . . ]      o: the oldest that is still seen
            after     [ s s s . ] [ . o w w ] [ w . . . ]                              num_left is 8 more

        Only whole blocks leave. Those that the prefix cache knows stay there, and may be evicted once all of them left.
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
            self._prefix.release(span.entries[first:])
            del span.entries[first:]

    def skip_tokens(self, allocation: Allocation, num_tokens: int) -> None:
        """Leaves so many tokens out of the last span: the next ones count as if those stood before them."""
        assert not allocation.is_released and not allocation.is_forgotten
        allocation.last.num_left += num_tokens
        allocation.last.is_unregistrable = True

    def holds_copies(self, allocation: Allocation) -> bool:
        """Whether it keeps blocks whose content the prefix cache has in others; allocated anew, it would share those.

        That happens when requests with equal tokens run side by side: the first one's blocks become known.
        """
        return any(
            entry.block_id != block_id
            for span in allocation.spans
            if not span.num_left  # a text that has rolled on has other blocks behind its sinks
            for entry, block_id in zip(span.entries, span.table.block_ids, strict=False)
        )

    def fork(self, allocation: Allocation) -> Allocation:
        """A second holder of the same blocks, for another answer; the last block is copied by whoever writes first.

        All tokens must be computed, because a block is written by one holder only.
        """
        assert not allocation.is_released and not allocation.is_stale
        assert all(span.is_ready for span in allocation.spans), "a sequence is forked when its prompt is computed"
        spans = [span.fork(self._prefix) for span in allocation.spans]
        for chunk in allocation.held_chunks():
            self._chunks.acquire(chunk)
        return Allocation(allocation.layout, allocation.salt, allocation.tenant, spans, allocation.chain)

    def release(self, allocation: Allocation) -> None:
        """Gives everything back; a second call does nothing.

        What is computed of its last span stays known to the last token, for a conversation that goes on.
        A chunk that it owns and has not completed is abandoned, so that those who wait for it plan again.
        """
        if allocation.is_released:
            return
        allocation.is_released = True
        last = allocation.last
        is_written = last.computed_step != self._prefix.unwritten_step or last.computed_step < 0
        if self._prefix_caching and is_written and last.chunk is None and not allocation.is_stale:
            last.register_tail(self._prefix, allocation.chain, self._step)
        for span in allocation.spans:
            if span.chunk is None:
                span.table.release()
                self._prefix.release(span.entries)
            elif span.is_owner and not span.chunk.is_ready:
                self._chunks.abandon(span.chunk)
        for chunk in allocation.held_chunks():
            self._chunks.release(chunk)

    def rollback_step(self, allocation: Allocation) -> None:
        """Takes back what this allocation made known in the current step, because the step failed.

        Prefix blocks that it registered since `begin_step`, and all that was computed after them, are not found any
        more; chunks that it completed since then, or has not completed, are abandoned. Only `release` is left to do.
        Call it for every allocation that took part in the step; others who read any of it see `is_stale`.
        """
        allocation.is_forgotten = True
        for span in allocation.spans:
            if span.registered_step == self._step:
                for entry in span.registered:
                    self._prefix.drop(entry)
            chunk = span.chunk
            if chunk is not None and span.is_owner and not (chunk.is_ready and chunk.completed_step < self._step):
                self._chunks.abandon(chunk)

    def record_compute(self, chunk: Chunk, milliseconds: float) -> None:
        """Notes how long a chunk took to compute, for the statistics."""
        chunk.compute_ms += milliseconds
        self._counters.computes += 1
        self._counters.compute_ms += milliseconds

    def chunks(self) -> list[Chunk]:
        """All chunks, oldest first, those being computed included."""
        return self._chunks.chunks()

    def find_chunks(self, name_or_key: str | Key, salt: str | None = "", tenant: str = "") -> list[Chunk]:
        """The chunks of a tenant with this name, under one salt or (None) any, or the one with this key.

        Raises:
            UnknownChunk: there is none.
        """
        return self._chunks.named(name_or_key, salt, tenant)

    def pin(self, name_or_key: str | Key, salt: str | None = "", tenant: str = "") -> int:
        """Protects chunks from eviction, those that there are now; returns how many. See `keep` for later ones.

        Raises:
            UnknownChunk: there is none.
        """
        return self._set_pinned(name_or_key, salt, tenant, True)

    def unpin(self, name_or_key: str | Key, salt: str | None = "", tenant: str = "") -> int:
        """Lets chunks be evicted again; returns how many have this name.

        Raises:
            UnknownChunk: there is none.
        """
        return self._set_pinned(name_or_key, salt, tenant, False)

    def pin_when_ready(self, name: str, tenant: str = "", wanted: bool = True) -> None:
        """Says that chunks of a tenant which get this name from now on, under any salt, are to be pinned when ready.

        The name of a document stands for its parts, too, if it is split ("name (1/3)").
        They are pinned as long as the tenant's pins leave half of its quota (half of the pool, if it has none) to what
        is not pinned; further ones are cached like any other. `wanted=False` ends it, for known names or not; what is
        pinned stays so until `unpin`.

        Raises:
            QuotaExceeded: the tenant keeps `MAX_KEPT_NAMES` names already.
        """
        kept = self._chunks.open(tenant).kept
        if wanted:
            kept.add(name)
        else:
            kept.discard(name)
            self._chunks.close(tenant)

    def delete(
        self, name_or_key: str | Key, salt: str | None = "", tenant: str = "", *, when_idle: bool = False
    ) -> int:
        """Drops chunks, pinned or not, all with this name or none; returns how many.

        With `when_idle`, those in use or being computed are found by nobody new from now on. Requests that hold them
        go on with them, and their blocks are free when the last of these has left.

        Raises:
            UnknownChunk: there is none.
            ChunkInUse: a running request uses one of them, and `when_idle` is off.
        """
        chunks = self._chunks.named(name_or_key, salt, tenant)
        self._chunks.delete(chunks, when_idle=when_idle)
        return len(chunks)

    def set_priority(self, name_or_key: str | Key, priority: float, salt: str | None = "", tenant: str = "") -> int:
        """Says how much chunks are wanted, 0 to 1 (0.5 at first), for the policy `priority`; returns how many.

        Raises:
            UnknownChunk: there is none.
            InvalidConfig: not between 0 and 1.
        """
        if isinstance(priority, bool) or not isinstance(priority, int | float) or not 0.0 <= priority <= 1.0:
            raise InvalidConfig(f"the priority of chunks must be between 0 and 1, got {priority!r:.80}")
        chunks = self._chunks.named(name_or_key, salt, tenant)
        for chunk in chunks:
            self._chunks.set_priority(chunk, priority)
        return len(chunks)

    def set_quota(self, tenant: str, num_bytes: int | None) -> None:
        """Limits the chunk blocks of a tenant, or (None) no longer; whole blocks only.

        Its idle chunks leave at once as far as needed. What is pinned or in use above the quota stays, and nothing new
        is computed until there is room again.

        Raises:
            InvalidConfig: not between 0 and 2**50.
        """
        if num_bytes is not None and not 0 <= num_bytes <= MAX_QUOTA_BYTES:
            raise InvalidConfig(f"a quota must be between 0 and {MAX_QUOTA_BYTES} bytes, got {num_bytes!r}")
        self._chunks.set_quota(tenant, num_bytes, self.bytes_per_block)

    def tenant_usage(self, tenant: str = "") -> TenantUsage:
        """What a tenant has in the chunk pool now."""
        account = self._chunks.account(tenant)
        num_bytes = account.num_blocks * self.bytes_per_block
        return TenantUsage(
            account.num_chunks,
            account.num_blocks,
            num_bytes,
            account.quota_bytes,
            account.num_idle_blocks,
            account.num_pinned_blocks,
        )

    def usages(self) -> Mapping[str, TenantUsage]:
        """What each tenant has in the chunk pool now; tenants without chunks and quota are left out.

        The mapping is never changed afterwards. Only tenants with a change since the last call are looked at.
        """
        if changed := self._chunks.take_changed():
            usages = dict(self._usages)
            for tenant in changed:
                usages[tenant] = self.tenant_usage(tenant)
                if not usages[tenant].num_blocks and usages[tenant].quota_bytes is None:
                    del usages[tenant]
            self._usages = usages
        return self._usages

    def prefix_tree(self, limits: TreeLimits | None = None, tenant: str | None = "") -> PrefixTree:
        """The conversations and documents that are known of a tenant, or (None) of all, as a tree.

        Takes time for what is shown, however much is cached; see `TreeLimits`.
        """
        view = TreeView(self._prefix, self._chunks, self._origins, limits or TreeLimits(), self._clock())
        return view.tree(tenant)

    def block_map(self) -> BlockMap:
        """What every block of both pools is doing now; one pass over them."""
        pinned = (block_id for chunk in self._chunks.chunks() if chunk.pinned for block_id in chunk.block_ids)
        return BlockMap(
            request=states_of(self.request_pool, kept=self._prefix.block_ids()),
            chunk_cache=states_of(self.chunk_pool, kept=None, pinned=pinned),
        )

    def reset(self) -> None:
        """Drops everything that no allocation holds, pinned chunks too."""
        self._prefix.clear()
        self._chunks.clear()

    @property
    def num_spare_blocks(self) -> int:
        """Blocks of the request pool that are free, or that only the prefix cache holds."""
        return self.request_pool.num_free + self._prefix.num_idle

    def used_blocks(self) -> tuple[list[BlockId], list[BlockId]]:
        """Blocks of the request pool and of the chunk pool that hold something."""
        return _used(self.request_pool), _used(self.chunk_pool)

    def evict_cold(self, min_accesses: int, idle_seconds: float) -> int:
        """Lets chunks leave that are idle for so long, and were used less often than that; returns how many.

        Those that are pinned or in use stay.

        Raises:
            InvalidConfig: a number outside its range.
        """
        if not 0 <= min_accesses <= 2**40 or not 0.0 <= idle_seconds <= 1e12:
            raise InvalidConfig(
                "min_accesses must be between 0 and 2**40 and idle_seconds between 0 and 1e12, "
                f"got {min_accesses!r} and {idle_seconds!r}"
            )
        before = self._clock() - idle_seconds
        cold = [
            chunk
            for chunk in self._chunks.chunks()
            if chunk.is_evictable and chunk.hits < min_accesses and chunk.last_used <= before
        ]
        for chunk in cold:
            self._chunks.evict(chunk)
        return len(cold)

    def statistics(self) -> ChunkCacheStats:
        """Counters and fill levels at this moment."""
        return snapshot(self._counters, self._chunks, self._prefix, self.request_pool)

    def check_invariants(self) -> None:
        """Checks pools, prefix cache and chunk index (slow; for tests)."""
        self.request_pool.check_invariants()
        self.chunk_pool.check_invariants()
        self._prefix.check_invariants()
        self._chunks.check_invariants()

    def _chain(self, salt: str, tenant: str) -> KeyChain:
        return KeyChain(self.fingerprint, salt, self.config.hash_algorithm, tenant=tenant)

    def _set_pinned(self, name_or_key: str | Key, salt: str | None, tenant: str, pinned: bool) -> int:
        chunks = self._chunks.named(name_or_key, salt, tenant)
        for chunk in chunks:
            self._chunks.set_pinned(chunk, pinned)
        return len(chunks)


def _used(pool: BlockPool) -> list[BlockId]:
    return [block_id for block_id in map(BlockId, range(pool.num_blocks)) if pool.reference_count(block_id)]
