"""Our own engine as a peer, with the chunk cache on or off."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from kvmosaic.assembly import AnyModel
from kvmosaic.bench.peers.peer import OFF, OWN, BatchTimes, RequestTimes
from kvmosaic.config import ChunkCacheConfig, EngineConfig
from kvmosaic.config.chunk_cache import AUTO_SIZE
from kvmosaic.llm import LLM
from kvmosaic.prompt import Prompt
from kvmosaic.sampling import RequestOutput, SamplingParams


class OwnPeer:
    """kvmosaic; with the chunk cache off it is an ordinary engine with prefix caching."""

    def __init__(
        self, model: AnyModel, *, enable_chunk_cache: bool, strategy: str = "shared", capacity: str | None = None
    ) -> None:
        self.is_ours = enable_chunk_cache
        self.name = OWN if enable_chunk_cache else OFF
        self.dtype = model.weight_type
        self.process_id = os.getpid()
        self.llm = LLM(
            model,
            enable_chunk_cache=enable_chunk_cache,
            chunk_cache_config=ChunkCacheConfig(
                chunk_cache_size=capacity or AUTO_SIZE, position_strategy=strategy, repair="none"
            ),
            engine_config=EngineConfig(request_cache_size=capacity) if capacity else EngineConfig(),
        )

    def reset(self) -> None:
        """See `Peer.reset`."""
        self.llm.engine.kv_cache.reset()

    def answer(self, prompts: Sequence[Prompt], num_answer: int) -> BatchTimes:
        """See `Peer.answer`."""
        params = SamplingParams(temperature=0, max_tokens=num_answer, ignore_eos=True)
        begin = time.monotonic()
        outputs = self.llm.generate(list(prompts), params)
        seconds = time.monotonic() - begin
        return BatchTimes(seconds, tuple(_reading(output, begin) for output in outputs), self._kv_bytes())

    def close(self) -> None:
        """See `Peer.close`."""
        self.llm.close()

    def _kv_bytes(self) -> int:
        statistics = self.llm.get_chunk_cache_stats()
        bytes_per_block = self.llm.model.bytes_per_token() * self.llm.chunk_cache_config.block_size
        return (statistics.used_blocks + statistics.request_used_blocks) * bytes_per_block


def _reading(output: RequestOutput, begin: float) -> RequestTimes:
    metrics, num_answer = output.metrics, len(output.outputs[0].token_ids)
    assert metrics.first_token_time is not None and metrics.finished_time is not None, "it is finished"
    later = metrics.finished_time - metrics.first_token_time
    return RequestTimes(
        first_seconds=metrics.first_token_time - begin,
        token_seconds=later / (num_answer - 1) if num_answer > 1 else None,
        num_prompt=len(output.prompt_token_ids),
        num_answer=num_answer,
        num_computed=output.reuse.computed_tokens,
    )
