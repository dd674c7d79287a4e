"""Write log: when each block was last allocated to be written. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvmosaic.integrations.vllm.scheduler.block_store import KV_GROUP


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
