"""Block store: vLLM's own block pool, read as a store of chunks, and when each block was last written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

KV_GROUP = 0
"""Composing requires all layers in one KV cache group: see `trouble`."""
HashedBlock = tuple[Any, Any]
"""A block, and the hash under which it was cached: as long as it has that hash, its content is the same."""


class BlockStore:
    """Finds cached blocks, and holds references to the blocks that this step's moves read.

    A reference raises a block's ref count, as a request does. For moves it is acquired while a step is being scheduled
    and released when that step is complete: later steps write into the block only after this step's moves. What is read
    in place is pinned as long as its reader runs.

    Of vLLM it uses the block pool's `get_cached_block`, `touch`, `free_blocks`, `evict_blocks`, `get_num_free_blocks`
    and the fields of its blocks; of the free queue, `remove` and `prepend_n`, where it has them.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._held: list[Any] = []
        self._pinned: dict[str, list[Any]] = {}

    @property
    def num_blocks(self) -> int:
        """Number of usable blocks."""
        return int(self._pool.num_gpu_blocks) - 1  # one is the null block

    @property
    def table(self) -> object | None:
        """The hash table of cached blocks: a new object after a reset of the prefix cache; None if that is unknown."""
        return getattr(self._pool, "cached_block_hash_to_block", None)

    @property
    def num_free(self) -> int:
        """Number of blocks that vLLM can allocate, cached ones included."""
        return int(self._pool.get_num_free_blocks())

    @property
    def num_empty(self) -> int:
        """Number of free blocks that are not cached, at least; 0 if that is unknown. vLLM allocates these first."""
        table: Any = self.table
        return max(self.num_free - len(table), 0) if hasattr(table, "__len__") else 0

    def find(self, hashes: Sequence[Any]) -> tuple[Any, ...] | None:
        """The cached blocks of these hashes; None if any is missing."""
        blocks = []
        for block_hash in hashes:
            found = self._pool.get_cached_block(block_hash, [KV_GROUP])
            if not found:
                return None
            blocks.append(found[KV_GROUP])
        return tuple(blocks)

    def num_leading(self, hashes: Sequence[Any]) -> int:
        """Number of leading hashes that are cached."""
        for number, block_hash in enumerate(hashes):
            if not self._pool.get_cached_block(block_hash, [KV_GROUP]):
                return number
        return len(hashes)

    def forget(self, blocks: Iterable[Any]) -> None:
        """Removes blocks from the prefix cache; requests that use them keep them."""
        self.forget_ids(block.block_id for block in blocks)

    def forget_ids(self, block_ids: Iterable[int]) -> None:
        """The same by their ids."""
        self._pool.evict_blocks(set(block_ids))

    def evict_last(self, blocks: Iterable[Any]) -> None:
        """Moves free blocks to the tail of vLLM's free queue; the first of them is evicted first.

        A touch takes a block out of the queue, and freeing a cached block appends it. No reference is left: the blocks
        stay free, so vLLM allocates them before it would preempt a request, and can reset its prefix cache.
        """
        blocks = [block for block in blocks if not block.ref_cnt]
        self._pool.touch(blocks)
        self._pool.free_blocks(blocks)

    def evict_first(self, blocks: Iterable[HashedBlock]) -> None:
        """Moves free, cached blocks to the head of vLLM's free queue; the first of them is evicted first.

        `free_blocks` appends whatever is cached, so the queue itself is asked. That is safe: the queue is nothing but
        the order of eviction. A block in it has no reference and keeps its hash. vLLM removes the hash when it
        allocates the block, wherever it was, and a hit takes it out of the queue, wherever it is. A vLLM whose queue
        cannot prepend keeps its own order.
        """
        queue: Any = getattr(self._pool, "free_block_queue", None)
        if not hasattr(queue, "prepend_n") or not hasattr(queue, "remove"):
            return
        free = [block for block, name in blocks if not block.ref_cnt and not block.is_null and block.block_hash == name]
        for block in free:
            queue.remove(block)
        queue.prepend_n(free)

    def acquire(self, blocks: Iterable[Any]) -> None:
        """Raises the ref counts of blocks, so that they are not evicted until `release`."""
        blocks = list(blocks)
        self._pool.touch(blocks)
        self._held += blocks

    def release(self) -> None:
        """Releases all references."""
        if self._held:
            held, self._held = self._held, []
            self._pool.free_blocks(reversed(held))

    def pin(self, request_id: str, blocks: Iterable[Any]) -> None:
        """Raises the ref counts of blocks that a request reads in every step, until `unpin`."""
        assert request_id not in self._pinned
        self._pinned[request_id] = blocks = list(blocks)
        self._pool.touch(blocks)

    def unpin(self, request_id: str) -> None:
        """Releases what a request pinned, if anything."""
        if blocks := self._pinned.pop(request_id, None):
            self._pool.free_blocks(reversed(blocks))

    @property
    def pinned(self) -> tuple[str, ...]:
        """Requests that pin blocks."""
        return tuple(self._pinned)


class WriteLog:
    """The last step in which each block was allocated to a request that writes it.

    A block can be evicted, written by others, and cached again under its old hash, unnoticed between two lookups. Then
    its content matches its hash only after the step that writes it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._last: dict[int, int] = {}

    def note(self, scheduled: Any, step: int, moved: Mapping[str, int]) -> None:
        """Records a scheduled step; `moved` has the tokens moved or loaded in, for requests that begin in it.

        Blocks that a request found in the prefix cache are not written.
        """
        for new in scheduled.scheduled_new_reqs:
            self._give(new.block_ids, new.num_computed_tokens - moved.get(new.req_id, 0), step)
        known = scheduled.scheduled_cached_reqs
        for name, blocks, num_computed in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            if blocks is not None:
                has_begun_again = name in known.resumed_req_ids
                self._give(blocks, num_computed - moved.get(name, 0) if has_begun_again else 0, step)

    def _give(self, block_ids: Any, num_found: int, step: int) -> None:
        for block_id in block_ids[KV_GROUP][num_found // self._block_size :]:
            self._last[block_id] = step

    def since(self, blocks: Iterable[Any], step: int) -> bool:
        """Whether any of these blocks was allocated in `step` or later."""
        return any(self._last.get(block.block_id, -1) >= step for block in blocks)
