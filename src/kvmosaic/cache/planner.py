"""The planner: plans prompts, and keeps pools, tables and caches in step with what the engine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvmosaic.cache.attachment import AttachedSpan, Attachment
from kvmosaic.cache.block_pool import BlockPool
from kvmosaic.cache.block_table import BlockCopy, BlockTable
from kvmosaic.cache.chunk import Chunk, ChunkState
from kvmosaic.cache.chunk_index import ChunkIndex
from kvmosaic.cache.keys import Key, KeyChain, encode_tokens
from kvmosaic.cache.lookup import Found, Lookup, is_closed
from kvmosaic.cache.plan import Action, Plan, SpanPlan
from kvmosaic.cache.prefix_cache import PrefixCache
from kvmosaic.cache.room import Room
from kvmosaic.cache.statistics import ChunkCacheStats, Counters, snapshot
from kvmosaic.config import ChunkCacheConfig
from kvmosaic.errors import InvalidConfig
from kvmosaic.eviction import choose
from kvmosaic.layout import Layout


class Planner:
    """Everything the engine needs to know about memory, without a tensor.

        plan = planner.plan(layout)               what would be reused, computed, waited for
        attachment = planner.attach(plan)         room for all of it, all or nothing
        planner.begin_step()
        planner.advance(attachment, 1, 512)       span 1 gets 512 tokens in the step being assembled
        copies = planner.extend(attachment, [t])  a sampled token: room for its keys and values
        other = planner.fork(attachment)          a second answer to the same prompt
        planner.release(attachment)               always, in the end

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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes empty pools and caches.

        Args:
            fingerprint: identifies the model and everything else that decides keys and values.
            config: block size, limits, hash and eviction.
            request_blocks: size of the pool for prefixes, questions and answers.
            chunk_blocks: size of the pool for chunks.
            prefix_caching: whether blocks outside chunks are kept for later requests.
            clock: seconds that never run backwards.
        """
        policy = choose(config.eviction)
        verify = config.verify_tokens or config.hash_algorithm != "sha256"
        self.fingerprint = fingerprint
        self.config = config
        self.request_pool = BlockPool("request", request_blocks, config.block_size)
        self.chunk_pool = BlockPool("chunk_cache", chunk_blocks, config.block_size)
        self._prefix_caching = prefix_caching
        self._clock = clock
        self._counters = Counters()
        self._prefix = PrefixCache(self.request_pool, policy, clock, verify=verify)
        self._chunks = ChunkIndex(self.chunk_pool, policy, clock, max_chunks=config.max_chunks, verify=verify)
        self._lookup = Lookup(self._chunks, self._prefix if prefix_caching else None, self._counters, clock)
        self._room = Room(self.request_pool, self._prefix, self._chunks)
        self._step = 0

    def plan(self, layout: Layout, salt: str = "") -> Plan:
        """What would be reused, computed or waited for. Changes nothing but the average lookup time."""
        return self._lookup.plan(layout, salt, self._chain(salt))

    def attach(self, plan: Plan) -> Attachment:
        """Holds everything that is reused and makes room for everything that is not; all of it or nothing.

        What the plan found is looked up again: what was evicted since is computed, what came to be cached is used.

        Raises:
            OutOfBlocks: running requests hold too much right now; try again when one has ended.
            ChunkCacheFull: the prompt's chunks can never fit (pinned ones stay).
            RequestTooLarge: the rest of the prompt can never fit.
        """
        started = self._clock()
        found = self._lookup.again(plan)
        if found is None:
            plan = self.plan(plan.layout, plan.salt)
            found = self._lookup.again(plan)
            assert found is not None, "a new plan passes over keys that are taken"
        need = self._room.check(plan, found)
        for here in found:
            self._prefix.hold(here.entries)
            self.request_pool.retain(entry.block_id for entry in here.entries)
        known: dict[Key, Chunk] = {here.chunk.key: here.chunk for here in found if here.chunk is not None}
        for chunk in known.values():
            self._chunks.hold(chunk)
        held, spans = dict(known), list[AttachedSpan]()
        try:
            self._room.make(need)
            for span, here in zip(plan.spans, found, strict=True):
                if span.is_chunk:
                    spans.append(self._attach_chunk(plan, span, held))
                else:
                    spans.append(self._attach_prefix(plan, span, here))
        except BaseException:
            self._detach(spans, found[len(spans) :], held, known)
            raise
        self._counters.attaches += 1
        self._counters.attach_seconds += self._clock() - started
        return Attachment(plan.layout, plan.salt, spans, self._chain(plan.salt))

    def _detach(
        self, spans: Sequence[AttachedSpan], rest: Sequence[Found], held: dict[Key, Chunk], known: dict[Key, Chunk]
    ) -> None:
        """Undoes an attach that failed half way."""
        for span in spans:
            if span.chunk is None:
                span.table.release()
                self._prefix.leave(span.entries)
        for here in rest:
            self.request_pool.release([entry.block_id for entry in here.entries])
            self._prefix.leave(here.entries)
        for key, chunk in held.items():
            if key not in known:
                self._chunks.abandon(chunk)
            self._chunks.leave(chunk)

    def begin_step(self) -> None:
        """Says that a new step is being assembled: `forget` undoes what was advanced since the last call."""
        self._step += 1

    def advance(self, attachment: Attachment, span_index: int, num_tokens: int) -> None:
        """Notes that the next `num_tokens` tokens of a span are computed, or will be by the step being assembled.

        Full blocks become known to the prefix cache, a closed span's last block too, and a complete chunk is ready.
        """
        assert not attachment.is_released and not attachment.is_forgotten
        span = attachment.spans[span_index]
        assert 0 <= num_tokens <= span.num_tokens - span.num_computed, "no more tokens than there are"
        if (chunk := span.chunk) is not None:
            assert span.is_owner and chunk.state is ChunkState.COMPUTING, "a chunk is computed by its owner, once"
            chunk.num_computed += num_tokens
            if chunk.num_computed == chunk.num_tokens:
                self._chunks.complete(chunk, self._step)
            return
        span.computed += num_tokens
        if self._prefix_caching:
            span.register(self._prefix, attachment.chain, self._step)

    def extend(self, attachment: Attachment, token_ids: Sequence[int]) -> list[BlockCopy]:
        """Grows the last span by answer tokens, which are then to be computed; returns the copies to carry out first.

        Raises:
            OutOfBlocks: the request pool is full of things in use; nothing has changed.
        """
        assert not attachment.is_released and not attachment.is_forgotten
        span = attachment.last
        assert not span.is_closed, "only a question or a plain prompt grows"
        tokens = encode_tokens(token_ids)
        self._room.make_request_blocks(span.table.blocks_to_append(len(token_ids)))
        copies = span.table.append(len(token_ids))
        span.tokens += tokens
        return copies

    def holds_copies(self, attachment: Attachment) -> bool:
        """Whether it keeps blocks whose content the prefix cache has in others; attached anew, it would share those.

        That happens when requests with equal tokens run side by side: the first one's blocks become known.
        """
        return any(
            entry.block_id != block_id
            for span in attachment.spans
            for entry, block_id in zip(span.entries, span.table.block_ids, strict=False)
        )

    def fork(self, attachment: Attachment) -> Attachment:
        """A second holder of the same blocks, for another answer; the last block is copied by whoever writes first.

        All tokens must be computed, because a block is written by one holder only.
        """
        assert not attachment.is_released and not attachment.is_stale
        assert all(span.is_ready for span in attachment.spans), "a sequence is forked when its prompt is computed"
        spans = [span.fork(self._prefix) for span in attachment.spans]
        for chunk in attachment.held_chunks():
            self._chunks.hold(chunk)
        return Attachment(attachment.layout, attachment.salt, spans, attachment.chain)

    def release(self, attachment: Attachment) -> None:
        """Gives everything back; a second call does nothing.

        A chunk that it owns and has not completed is abandoned, so that those who wait for it plan again.
        """
        if attachment.is_released:
            return
        attachment.is_released = True
        for span in attachment.spans:
            if span.chunk is None:
                span.table.release()
                self._prefix.leave(span.entries)
            elif span.is_owner and not span.chunk.is_ready:
                self._chunks.abandon(span.chunk)
        for chunk in attachment.held_chunks():
            self._chunks.leave(chunk)

    def forget(self, attachment: Attachment) -> None:
        """Takes back what this attachment made known in the current step, because the step failed.

        Prefix blocks that it registered since `begin_step`, and all that was computed after them, are not found any
        more; chunks that it completed since then, or has not completed, are abandoned. Only `release` is left to do.
        Call it for every attachment that took part in the step; others who read any of it see `is_stale`.
        """
        attachment.is_forgotten = True
        for span in attachment.spans:
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

    def find_chunks(self, name_or_key: str | Key, salt: str = "") -> list[Chunk]:
        """The chunks with this name in this tenant's part, or the one with this key.

        Raises:
            UnknownChunk: there is none.
        """
        return self._chunks.named(name_or_key, salt)

    def pin(self, name_or_key: str | Key, salt: str = "") -> int:
        """Protects chunks from eviction; returns how many have this name.

        Raises:
            UnknownChunk: there is none.
        """
        return self._set_pinned(name_or_key, salt, True)

    def unpin(self, name_or_key: str | Key, salt: str = "") -> int:
        """Lets chunks be evicted again; returns how many have this name.

        Raises:
            UnknownChunk: there is none.
        """
        return self._set_pinned(name_or_key, salt, False)

    def delete(self, name_or_key: str | Key, salt: str = "") -> int:
        """Drops chunks, pinned or not, all with this name or none; returns how many.

        Raises:
            UnknownChunk: there is none.
            ChunkInUse: a running request uses one of them.
        """
        chunks = self._chunks.named(name_or_key, salt)
        self._chunks.delete(chunks)
        return len(chunks)

    def set_priority(self, name_or_key: str | Key, priority: float, salt: str = "") -> int:
        """Says how much chunks are wanted, 0 to 1 (0.5 at first), for the policy `priority`; returns how many.

        Raises:
            UnknownChunk: there is none.
            InvalidConfig: not between 0 and 1.
        """
        if not 0.0 <= priority <= 1.0:
            raise InvalidConfig(f"a priority must be between 0 and 1, got {priority}")
        chunks = self._chunks.named(name_or_key, salt)
        for chunk in chunks:
            self._chunks.set_priority(chunk, priority)
        return len(chunks)

    def reset(self) -> None:
        """Drops everything that no attachment holds, pinned chunks too."""
        self._prefix.clear()
        self._chunks.delete([chunk for chunk in self._chunks.chunks() if not chunk.users])

    def statistics(self) -> ChunkCacheStats:
        """Counters and fill levels at this moment."""
        return snapshot(self._counters, self._chunks, self._prefix, self.request_pool)

    def check_invariants(self) -> None:
        """Checks pools, prefix cache and chunk index (slow; for tests)."""
        self.request_pool.check_invariants()
        self.chunk_pool.check_invariants()
        self._prefix.check_invariants()
        self._chunks.check_invariants()

    def _chain(self, salt: str) -> KeyChain:
        return KeyChain(self.fingerprint, salt, self.config.hash_algorithm)

    def _set_pinned(self, name_or_key: str | Key, salt: str, pinned: bool) -> int:
        chunks = self._chunks.named(name_or_key, salt)
        for chunk in chunks:
            self._chunks.set_pinned(chunk, pinned)
        return len(chunks)

    def _attach_chunk(self, plan: Plan, span: SpanPlan, held: dict[Key, Chunk]) -> AttachedSpan:
        chunk = held.get(span.key)
        is_owner = chunk is None
        if chunk is None:
            start = plan.layout.spans[span.index].start
            chunk = self._chunks.create(span.key, span.root, span.tokens, start, plan.salt)
            self._chunks.hold(chunk)
            held[span.key] = chunk
        else:
            chunk.hits += 1
        self._counters.lookups += 1
        self._counters.hits += not is_owner
        if span.name is not None:
            self._chunks.name(chunk, span.name)
        action: Action = "compute" if is_owner else ("reuse" if chunk.is_ready else "wait")
        return AttachedSpan(
            span.index, span.kind, action, chunk.table, span.root, bytearray(), chunk=chunk, is_owner=is_owner
        )

    def _attach_prefix(self, plan: Plan, span: SpanPlan, here: Found) -> AttachedSpan:
        closed = is_closed(plan.layout, span.index)
        reused = min(len(here.entries) * self.request_pool.block_size, span.num_tokens)
        block_ids = [entry.block_id for entry in here.entries]
        table = BlockTable.adopt(self.request_pool, block_ids, reused, grows=not closed)
        copies = table.append(span.num_tokens - reused)
        assert not copies, "reused blocks are full, or the span is complete"
        self._counters.prefix_lookup_tokens += span.num_tokens
        self._counters.prefix_hit_tokens += reused
        action: Action = "reuse" if reused == span.num_tokens else "compute"
        return AttachedSpan(
            span.index,
            span.kind,
            action,
            table,
            span.root,
            bytearray(span.tokens),
            is_closed=closed,
            computed=reused,
            entries=here.entries,
        )
