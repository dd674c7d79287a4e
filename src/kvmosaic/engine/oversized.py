"""Oversized prompts: documents that have no room in the chunk cache, answered as an ordinary prompt."""

from __future__ import annotations

from kvmosaic.cache import KVCache
from kvmosaic.engine.placement import PlacedPrompt, Placer
from kvmosaic.errors import PromptTooLong


class OversizedPrompts:
    """Places a prompt as an ordinary one if its chunks can never be in the cache together.

    Asked when a request arrives, and again if it is refused later: pins and quotas may have taken the room meanwhile.
    """

    def __init__(self, placer: Placer, kv_cache: KVCache, *, is_on: bool) -> None:
        self._placer = placer
        self._kv_cache = kv_cache
        self._is_on = is_on

    def as_ordinary(self, placed: PlacedPrompt) -> tuple[PlacedPrompt, str] | None:
        """A prompt without room as an ordinary one, and why; None: it has room, or is too long for that, too."""
        prompt, pool = placed.prompt, self._kv_cache.request_pool
        if not self._is_on or not prompt.chunks or placed.window is not None:
            return None
        num_blocks = self._kv_cache.num_too_large(placed.layout, prompt.salt, prompt.tenant)
        if num_blocks is None:
            return None
        joined = prompt.joined()
        if pool.blocks_for(joined.num_tokens + 1) > pool.num_blocks:
            return None
        try:
            ordinary = self._placer.place(joined)
        except PromptTooLong:
            return None
        return ordinary, (
            f"its documents need {num_blocks} blocks of {pool.block_size} tokens, more than the chunk cache has for "
            "them; computed as an ordinary prompt, in which documents see each other"
        )
