"""Private copies: blocks into which documents were moved for one request, which vLLM should evict first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvmosaic.integrations.vllm.scheduler.block_store import BlockStore, HashedBlock


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
