"""Chunk requests: in-flight chunk prompts in vLLM, each computed once for all waiting requests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from kvmosaic.vllm.scheduler.chunk_prompts import ChunkPrompt
from kvmosaic.vllm.scheduler.composed import ComposedRequest
from kvmosaic.vllm.scheduler.tier_side import LoadedChunk, Tiering


class ChunkRequests:
    """Submits chunk prompts to the scheduler, as ordinary requests, and tracks which are in flight.

    A chunk prompt is identified by the hash of its last block, which covers all its tokens, its salt and its adapter.
    Parts that are in a tier are loaded, not computed.
    """

    def __init__(self, submit: Callable[[Any], None], tiering: Tiering | None = None) -> None:
        self._submit = submit
        self.tiering = tiering
        self._under_way: dict[Any, str] = {}
        self._names: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._prefix = f"kvmosaic-chunk-{os.urandom(4).hex()}-"

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._names

    def __len__(self) -> int:
        return len(self._names)

    def is_under_way(self, name: Any) -> bool:
        """Whether a chunk prompt of that name is in flight."""
        return name in self._under_way

    def build(self, composed: ComposedRequest, prompt: ChunkPrompt) -> Any:
        """Builds a request for a chunk prompt; its block hashes are the ones by which an ordinary prompt finds it."""
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

    def ask(self, request: Any, prompt: ChunkPrompt) -> None:
        """Submits a request that was built for a chunk prompt."""
        name = request.block_hashes[-1]
        self._under_way[name] = request.request_id
        self._names[request.request_id] = name
        if self.tiering is not None:
            self.tiering.begin(request, prompt)
        self._submit(request)

    def match(self, request: Any, num_local: int) -> int | None:
        """Number of tokens after the first `num_local` that can be loaded; None: wait."""
        return 0 if self.tiering is None else self.tiering.match(request, num_local)

    def on_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Handles the block allocation of one of our requests."""
        if self.tiering is not None:
            self.tiering.on_alloc(request, blocks, num_external)

    def finished(self, request: Any) -> tuple[Any, LoadedChunk | None]:
        """Removes a finished request; returns its name, and the source of its chunk if it came from a tier."""
        name = self._names.pop(request.request_id)
        if self._under_way.get(name) == request.request_id:
            del self._under_way[name]
        loaded = None
        if self.tiering is not None:
            loaded = self.tiering.finished(request.request_id, request.block_hashes)
        return name, loaded
