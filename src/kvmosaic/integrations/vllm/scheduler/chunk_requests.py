"""Chunk prompts on their way through vLLM: computed once, whoever waits for them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvmosaic.integrations.vllm.scheduler.composed import ComposedRequest
from kvmosaic.integrations.vllm.scheduler.pieces import ChunkPrompt


class ChunkRequests:
    """Asks the scheduler for chunk prompts, as for any request, and remembers which are under way.

    A chunk prompt is named by the hash of its last block, which stands for all its tokens, its salt and its adapter.
    """

    def __init__(self, submit: Callable[[Any], None]) -> None:
        self._submit = submit
        self._under_way: dict[Any, str] = {}
        self._names: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._prefix = f"kvmosaic-chunk-{os.urandom(4).hex()}-"

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._names

    def __len__(self) -> int:
        return len(self._names)

    def is_under_way(self, name: Any) -> bool:
        """Whether a chunk prompt of that name is waiting or running."""
        return name in self._under_way

    def build(self, composed: ComposedRequest, prompt: ChunkPrompt) -> Any:
        """A request for a chunk prompt; its block hashes are those under which an ordinary prompt finds it."""
        asker = composed.request
        return Request(
            request_id=f"{self._prefix}{next(self._numbers)}",
            prompt_token_ids=list(prompt.token_ids),
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            pooling_params=None,
            client_index=asker.client_index,
            arrival_time=asker.arrival_time,
            lora_request=asker.lora_request,
            cache_salt=asker.cache_salt,
            priority=asker.priority,
            block_hasher=composed.ordinary_hasher,
        )

    def ask(self, request: Any) -> None:
        """Has a request of `build` computed."""
        name = request.block_hashes[-1]
        self._under_way[name] = request.request_id
        self._names[request.request_id] = name
        self._submit(request)

    def finished(self, request_id: str) -> Any:
        """Forgets a request that ended, in whatever way; its name."""
        name = self._names.pop(request_id)
        if self._under_way.get(name) == request_id:
            del self._under_way[name]
        return name
