"""Prompt settings: limits on a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from kvmosaic.errors import InvalidTokenId, PromptTooLong


class PromptSettings(Protocol):
    """Settings that a `PromptEncoder` needs; `ChunkCacheConfig` has all of them."""

    @property
    def chunk_separator(self) -> str | None:
        """Text that splits a prompt string; None never splits."""

    @property
    def max_chunk_tokens(self) -> int:
        """Maximum tokens of a chunk."""

    @property
    def max_prompt_chunks(self) -> int:
        """Maximum documents in one prompt."""

    @property
    def long_chunks(self) -> Literal["error", "split", "sections"]:
        """Handling of a longer document."""

    @property
    def max_section_tokens(self) -> int:
        """Maximum tokens of a section, where documents are divided at headings."""

    @property
    def preamble(self) -> str | int:
        """Where the part of a system text ends that documents see; see `kvmosaic.prompt.preamble`."""

    @property
    def find_documents(self) -> str:
        """Which documents are found in text; see `kvmosaic.prompt.patterns`."""

    @property
    def document_pattern(self) -> str | None:
        """A pattern of one's own for that."""

    @property
    def companions(self) -> str | tuple[str, ...]:
        """Texts that documents see with chunk_context "companions"; see `kvmosaic.prompt.companions`."""


def check_length(end: int, max_positions: int, max_new_tokens: int = 1) -> int:
    """Returns how many tokens remain for the answer to a prompt that ends before this position.

    Raises:
        PromptTooLong: the prompt and `max_new_tokens` need more than `max_positions`.
    """
    if end + max_new_tokens > max_positions:
        answer = "1 token" if max_new_tokens == 1 else f"{max_new_tokens} tokens"
        raise PromptTooLong(
            f"the prompt needs {end} positions and its answer {answer}, the model has {max_positions}; shorten the "
            "prompt or the answer, or place documents at position_strategy='shared', where they take the room of one",
            num_tokens=end + max_new_tokens,
            max_tokens=max_positions,
        )
    return max_positions - end


def check_token_ids(token_ids: Sequence[int], vocab_size: int, label: str) -> None:
    """Raises InvalidTokenId if an id is not a whole number from 0 to vocab_size - 1."""
    if not token_ids or (
        {int}.issuperset(map(type, token_ids)) and min(token_ids) >= 0 and max(token_ids) < vocab_size
    ):
        return
    for index, token_id in enumerate(token_ids):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
            raise InvalidTokenId(
                f"token {index} of the {label} is {token_id!r}; the model's token ids are whole numbers "
                f"from 0 to {vocab_size - 1}"
            )
