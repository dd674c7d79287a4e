"""Eviction order of vLLM's cached blocks: private copies of documents first, documents last."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from kvmosaic.vllm.operations import block_bytes
from kvmosaic.vllm.report_counters import ReportCounters
from kvmosaic.vllm.scheduler.block_store import KV_GROUP, BlockStore, HashedBlock
from kvmosaic.vllm.scheduler.chunk_prompts import first_private_block
from kvmosaic.vllm.scheduler.composed import ComposedRequest
from kvmosaic.vllm.scheduler.document_pool import Claim, DocumentPool
from kvmosaic.vllm.settings import DocumentCacheConfig, document_cache


class EvictionOrder:
    """Tells document pool and private copies what requests use, allocate and free.

        request admitted     its documents were used                 `on_use`
        blocks allocated     by requests that begin, or run          `before_alloc`, `on_alloc`, `on_step`
        request finished     its copies are of no more use           `on_finish`
        step complete        finished requests have freed blocks     `restore`

    Each engine has its own, since each has its own block pool. Nothing here raises.
    """

    def __init__(self, config: Any, kv_cache_config: Any, scheduler: Any) -> None:
        """The order of a scheduler's blocks.

        Raises:
            InvalidConfig: an invalid setting of the document pool.
        """
        self._settings: DocumentCacheConfig = document_cache(
            config.kv_transfer_config.kv_connector_extra_config, os.environ
        )
        (group, *_) = kv_cache_config.kv_cache_groups
        self._block_size = int(group.kv_cache_spec.block_size)
        self._block_bytes = block_bytes(group)
        limits = config.scheduler_config
        # each running request may begin a block, and all of them together compute so many tokens
        self._step_blocks = limits.max_num_batched_tokens // self._block_size + 2 * limits.max_num_seqs
        self._scheduler = scheduler
        self._pool: DocumentPool | None = None
        self._store: BlockStore | None = None
        self._copies = PrivateCopies()
        self._num_evicted = 0

    @property
    def pool(self) -> DocumentPool:
        """The document pool; vLLM creates its block pool after the connector."""
        assert self._pool is not None
        return self._pool

    def open(self, store: BlockStore) -> None:
        """Creates the pool over vLLM's block pool; called before everything else."""
        self._store = store
        self._pool = DocumentPool(
            store,
            self._settings.max_blocks(store.num_blocks, self._block_size, self._block_bytes),
            self._step_blocks,
            self._settings.policy,
            block_bytes=self._block_bytes,
        )

    def on_use(self, composed: ComposedRequest) -> None:
        """Handles a request whose documents are cached, since it is admitted."""
        prompts = {piece.span: piece.prompt for piece in composed.pieces}
        said = composed.composition
        number = 0
        for index, span in enumerate(composed.layout.spans):
            if span.segment.kind != "chunk":
                continue
            label = (said.labels[number] if said.labels else None) or ""
            priority = said.priorities[number] if said.priorities else None
            pin = bool(said.pins and said.pins[number])
            change = said.changes[number] if said.changes else 0
            number += 1
            if index not in prompts:  # repaired as a whole
                continue
            prompt = composed.prompts[prompts[index]]
            claim = None
            if label or priority is not None:
                claim = Claim(Claim().priority if priority is None else priority, bool(label) and pin, change)
            self.pool.use(composed.hashes[prompts[index]], prompt.num_tokens, label, claim)

    def update(self, claims: Mapping[str, Claim | None]) -> None:
        """Handles new priorities and pins of stored documents."""
        self.pool.update(claims)

    def before_alloc(self, request: Any) -> None:
        """Handles a request that vLLM is about to give blocks to."""
        self.pool.before_alloc(request.num_tokens // self._block_size + 1)

    def on_alloc(self, blocks: Any) -> None:
        """Handles the blocks of a request that begins."""
        self.pool.on_alloc(len(blocks.get_block_ids()[KV_GROUP]))

    def on_step(self, scheduled: Any) -> None:
        """Handles a scheduled step: blocks of running requests, and preempted ones."""
        new = (ids for ids in scheduled.scheduled_cached_reqs.new_block_ids if ids is not None)
        self.pool.on_alloc(sum(len(ids[KV_GROUP]) for ids in new))
        if getattr(scheduled, "preempted_req_ids", None):
            self.pool.on_free()

    def on_finish(self, request_id: str, composed: ComposedRequest | None) -> None:
        """Handles a request whose blocks vLLM frees next; `composed`: if it got copies of documents."""
        self.pool.on_free()
        if composed is not None:
            blocks = self._scheduler.kv_cache_manager.get_blocks(request_id).blocks[KV_GROUP]
            self._copies.add(blocks[first_private_block(composed.layout, self._block_size) :])

    def restore(self, tally: ReportCounters) -> None:
        """Restores the order after a step, and counts."""
        assert self._store is not None
        self._copies.evict_first(self._store, self._step_blocks)
        self.pool.before_alloc()
        tally.pooled(
            len(self.pool), self.pool.num_blocks, self.pool.num_pinned, self.pool.num_evicted - self._num_evicted
        )
        self._num_evicted = self.pool.num_evicted


class PrivateCopies:
    """Blocks of finished composed requests, from the first private one on, until they are first in vLLM's order.

        free queue   │ empty … empty │ copies │ prefixes, documents, least recently used first │
                       evicted first ──────────────────────────────────────────────────────▶ last

    Only a request with the same documents in the same order hits a copy, and it can be made again from the documents
    without computing anything. So a copy must not push out what has to be computed. It keeps its hash: an exact repeat
    hits it as long as its block is not needed.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, HashedBlock] = {}
        """By block id; the tail of each request first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, blocks: Iterable[Any]) -> None:
        """Adds the blocks of a request, in the order of its tokens, which vLLM is about to free."""
        for block in reversed(tuple(blocks)):
            if block.block_hash is not None:  # vLLM itself evicts the others first
                self._waiting[block.block_id] = (block, block.block_hash)

    def evict_first(self, store: BlockStore, num_needed: int) -> None:
        """Moves the free ones to the head of vLLM's free queue, unless `num_needed` blocks are empty.

        Blocks that are still referenced wait: by vLLM until a step is complete, or by a request that hit them.
        """
        if not self._waiting or store.num_empty >= num_needed:
            return
        held = {block_id: each for block_id, each in self._waiting.items() if each[0].ref_cnt}
        store.evict_first(each for block_id, each in self._waiting.items() if block_id not in held)
        self._waiting = {block_id: each for block_id, each in held.items() if each[0].block_hash == each[1]}
