"""Length check of this server: by its settings, its model and its chunk cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.api import length_check
from kvmosaic.api.length_check import most_chunk_tokens
from kvmosaic.errors import ChunkCacheFull

if TYPE_CHECKING:
    from kvmosaic.documents import DocumentDraft
    from kvmosaic.llm import LLM


def check_length(llm: LLM, draft: DocumentDraft, document_id: str | None = None) -> None:
    """Checks that a document alone fits into a prompt of this server.

    Raises:
        InvalidPrompt: see `kvmosaic.api.length_check`.
        ChunkCacheFull: it has more tokens than the chunk cache.
    """
    pool, limit = llm.engine.kv_cache.chunk_pool, most_chunk_tokens(llm.encoder)
    cache_tokens = pool.num_blocks * pool.block_size if llm.has_chunk_cache else limit
    prompt = length_check.check_length(llm.encoder, draft, document_id, min(limit, cache_tokens))
    if prompt is None or not llm.has_chunk_cache:
        return
    num_tokens = sum(chunk.num_tokens for chunk in prompt.chunks)
    if sum(pool.blocks_for(chunk.num_tokens) for chunk in prompt.chunks) > pool.num_blocks:
        raise ChunkCacheFull(
            f"the document has {num_tokens} tokens, and the chunk cache of this server {cache_tokens} "
            "(--chunk-cache-size); store it in parts, or ask the operator of the server for a larger cache"
        )
