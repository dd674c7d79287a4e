"""Own tokens of a request that reads documents in place: what vLLM knows of its prompt, and names of their blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash

from kvmosaic.integrations.vllm.scheduler.composed import missing_hashes
from kvmosaic.integrations.vllm.scheduler.in_place import InPlacePlan

_SPACE = "kvmosaic-in-place-1"


class OwnTokensHasher:
    """Hashes the blocks of own tokens: up to the first that reads a document or is shifted, as vLLM does.

    Later blocks are private: their hashes cover what was read, and where.
    """

    def __init__(
        self, marks: Sequence[tuple[int, tuple[Any, ...]]], block_size: int, digest: Callable[[Any], bytes]
    ) -> None:
        self._marks, self._block_size, self._digest = marks, block_size, digest

    def __call__(self, request: Any) -> list[BlockHash]:
        """Computes the missing hashes of full blocks."""
        return missing_hashes(request, self._block_size, self._digest, self._own_keys)

    def _own_keys(self, start: int, stop: int) -> tuple[Any, ...]:
        own = [(index - start, *mark) for index, mark in self._marks if start <= index < stop]
        return (_SPACE, *chain.from_iterable(own)) if own else ()


def hide_documents(request: Any, plan: InPlacePlan, max_model_len: int) -> None:
    """Leaves a request its own tokens; its answer stays as long as the whole prompt leaves room for."""
    room = max_model_len - request.num_prompt_tokens
    request.max_tokens = min(request.max_tokens, room)
    _set_prompt(request, plan.own_tokens(request.prompt_token_ids))


def show_documents(request: Any, token_ids: list[int]) -> None:
    """Gives a request that never ran its whole prompt back."""
    assert not request.num_output_tokens
    _set_prompt(request, token_ids)


def _set_prompt(request: Any, token_ids: list[int]) -> None:
    request.prompt_token_ids = token_ids
    request.num_prompt_tokens = len(token_ids)
    request._all_token_ids[:] = token_ids
