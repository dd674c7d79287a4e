"""Length check: refuses a text at its upload that no request could read."""

from __future__ import annotations

from kvmosaic.documents import DocumentDraft
from kvmosaic.prompt import Document, Prompt, PromptEncoder

MAX_WRAPPER_TOKENS = 256
"""Tokens that a chat template may add to a document, for the estimate."""


def most_chunk_tokens(encoder: PromptEncoder) -> int:
    """Returns the most tokens of a chunk, by the settings and by the model's positions."""
    limit = encoder.settings.max_chunk_tokens
    return limit if encoder.max_positions is None else min(limit, encoder.max_positions)


def check_length(encoder: PromptEncoder, draft: DocumentDraft, document_id: str | None, limit: int) -> Prompt | None:
    """Checks that a document alone fits into a prompt; returns that prompt, or None if the text is short.

    A short text is not tokenized: it has at most one token for each of its bytes.

    Args:
        encoder: the encoder of prompts.
        draft: the document.
        document_id: its id, for errors.
        limit: tokens up to which it is short.

    Raises:
        ChunkTooLong: it has more tokens than a chunk may have, and documents are not split.
        PromptTooLong: it has more tokens than the model has positions.
        TooManyChunks: it has more parts than a prompt may have.
    """
    if _max_tokens(draft, limit) <= limit:
        return None
    return encoder.encode_documents([Document(draft.text, draft.title, document_id)])


def _max_tokens(draft: DocumentDraft, limit: int) -> int:
    """An upper bound of the tokens of a text, without its bytes where its characters are already too many."""
    texts = (draft.text, draft.title or "")
    num_characters = sum(map(len, texts)) + MAX_WRAPPER_TOKENS
    return num_characters if num_characters > limit else sum(len(text.encode()) for text in texts) + MAX_WRAPPER_TOKENS
