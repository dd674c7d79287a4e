"""Block hashes of composed requests: private blocks, which only composing fills, have a hash space of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, hash_block_tokens

from kvmosaic.integrations.vllm.contract import Composition
from kvmosaic.integrations.vllm.scheduler.chunk_prompts import first_private_block

_SPACE = "kvmosaic-1"


class ComposedHasher:
    """Hashes the blocks of one composed request, as vLLM's own hasher does for an ordinary one.

        block          0       1       2       3       4
                   │ s s s │ s a a │ a b b │ b b q │ q q q │
        hash           of an ordinary     private, each with the segments that begin in it
                       prompt's

    A block's hash covers its tokens, all blocks before it, and (from the first private one on) how it was composed, the
    length of the system text, and where chunks and the question begin in it. So an ordinary prompt never hits
    approximate keys, and two composed prompts share their blocks as long as they begin alike.
    """

    def __init__(self, composition: Composition, block_size: int, digest: Callable[[Any], bytes]) -> None:
        self._block_size, self._digest = block_size, digest
        self._first_private = first_private_block(composition, block_size)
        self._method = (
            *(_SPACE, composition.position_strategy, composition.chunk_context),
            *(composition.repair, composition.system),
        )
        self._chunks, self._question = composition.starts, composition.end

    def __call__(self, request: Any) -> list[BlockHash]:
        """Computes the missing hashes of full blocks."""
        hashes: list[BlockHash] = []
        size = self._block_size
        before = request.block_hashes[-1] if request.block_hashes else None
        for block in range(len(request.block_hashes), request.num_tokens // size):
            start, stop = block * size, (block + 1) * size
            extra, _ = generate_block_hash_extra_keys(request, start, stop, 0)
            if block >= self._first_private:
                extra = (*(extra or ()), *self._method, *(at - start for at in self._chunks if start <= at < stop))
                if start <= self._question < stop:  # it sees everything, unlike a chunk at its position
                    extra = (*extra, "question", self._question - start)
            before = hash_block_tokens(self._digest, before, request.all_token_ids[start:stop], extra)
            hashes.append(before)
        return hashes
