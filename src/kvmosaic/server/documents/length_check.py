"""Length check: refuses a text at its upload that no request could read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmosaic.errors import ChunkCacheFull
from kvmosaic.prompt import Document

if TYPE_CHECKING:
    from kvmosaic.api.documents import DocumentContent
    from kvmosaic.documents import DocumentDraft
    from kvmosaic.llm import LLM
    from kvmosaic.server.services import Services

MAX_WRAPPER_TOKENS = 256
"""Tokens that a chat template may add to a document, for the estimate."""


def accepted(services: Services, body: DocumentContent, document_id: str | None) -> DocumentDraft:
    """Returns the draft of a body, if a request of this server could read it.

    Raises:
        InvalidDocument: a text or title that cannot be stored.
        InvalidPrompt, ChunkCacheFull: it is too long, see `check_length`.
    """
    draft, limits = body.draft(services.documents), services.documents.limits
    if len(draft.text) <= min(limits.max_characters, limits.max_bytes):  # the store refuses longer ones
        check_length(services.llm, draft, document_id)
    return draft


def check_length(llm: LLM, draft: DocumentDraft, document_id: str | None = None) -> None:
    """Checks that a document alone fits into a prompt of this server.

    A short text is not tokenized: it has at most one token for each of its bytes.

    Raises:
        ChunkTooLong: it has more tokens than a chunk may have, and the server does not split documents.
        PromptTooLong: it has more tokens than the model has positions.
        TooManyChunks: it has more parts than a prompt may have.
        ChunkCacheFull: it has more tokens than the chunk cache.
    """
    encoder, pool = llm.encoder, llm.engine.kv_cache.chunk_pool
    chunk_tokens = encoder.settings.max_chunk_tokens
    if encoder.max_positions is not None:
        chunk_tokens = min(chunk_tokens, encoder.max_positions)
    cache_tokens = pool.num_blocks * pool.block_size if llm.has_chunk_cache else chunk_tokens
    if _max_tokens(draft, min(chunk_tokens, cache_tokens)) <= min(chunk_tokens, cache_tokens):
        return
    document = Document(draft.text, draft.title, document_id)
    prompt = encoder.encode_documents([document])
    num_tokens = sum(chunk.num_tokens for chunk in prompt.chunks)
    num_blocks = sum(pool.blocks_for(chunk.num_tokens) for chunk in prompt.chunks)
    if llm.has_chunk_cache and num_blocks > pool.num_blocks:
        raise ChunkCacheFull(
            f"the document has {num_tokens} tokens, and the chunk cache of this server {cache_tokens} "
            "(--chunk-cache-size); store it in parts, or ask the operator of the server for a larger cache"
        )


def _max_tokens(draft: DocumentDraft, limit: int) -> int:
    """An upper bound of the tokens of a text, without its bytes where its characters are already too many."""
    texts = (draft.text, draft.title or "")
    num_characters = sum(map(len, texts)) + MAX_WRAPPER_TOKENS
    return num_characters if num_characters > limit else sum(len(text.encode()) for text in texts) + MAX_WRAPPER_TOKENS
