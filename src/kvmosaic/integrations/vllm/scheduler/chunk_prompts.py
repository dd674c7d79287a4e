"""Pieces of chunk prompts that make up a composed prompt. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmosaic.integrations.vllm.contract import Composition

PADDING_TOKEN = 0
"""Fills the last block of a chunk prompt; its keys and values are never read."""


@dataclass(frozen=True, slots=True)
class ChunkPrompt:
    """The prompt that computes and caches a chunk: what it saw, the chunk, and padding up to a full block.

        system + chunk    │ s s s s │ s c c c │ c c p p │     context 5 tokens, chunk 5 tokens, 2 of padding

    vLLM caches full blocks only, so without padding the last tokens of nearly every chunk would be lost. Padding comes
    last, so no token sees it.
    """

    token_ids: tuple[int, ...]
    num_tokens: int
    """Without padding."""
    num_seen: int
    """Tokens before the chunk."""

    @classmethod
    def of(cls, seen: Sequence[int], chunk: Sequence[int], block_size: int) -> ChunkPrompt:
        """The chunk prompt of a chunk that saw `seen`."""
        num_tokens = len(seen) + len(chunk)
        padding = -num_tokens % block_size
        return cls((*seen, *chunk, *(PADDING_TOKEN,) * padding), num_tokens, len(seen))


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A run of a composed prompt, `start` to `stop`, and its location in a chunk prompt.

    Token `start` of the composed prompt is token `offset` of chunk prompt number `prompt`, at position `offset`; the
    composed prompt reads it `distance` positions further on.
    """

    start: int
    stop: int
    prompt: int
    offset: int
    distance: int
    chunk: int | None
    """Number of the chunk; None for the system text."""


def take_apart(
    composition: Composition, token_ids: Sequence[int], block_size: int
) -> tuple[tuple[ChunkPrompt, ...], tuple[PromptPiece, ...]]:
    """Splits a composed prompt into chunk prompts and pieces, which cover tokens 0 to `composition.end`.

    Chunks of the same tokens share one chunk prompt. The system text comes from the first chunk's prompt, if the
    chunks saw it, and has its own prompt if they did not.
    """
    system = token_ids[: composition.system]
    seen = system if composition.chunk_context == "system" else ()
    numbers: dict[ChunkPrompt, int] = {}
    pieces: list[PromptPiece] = []

    def number_of(prompt: ChunkPrompt) -> int:
        return numbers.setdefault(prompt, len(numbers))

    if system and not seen:
        pieces.append(PromptPiece(0, len(system), number_of(ChunkPrompt.of((), system, block_size)), 0, 0, None))
    elif system:
        pieces.append(PromptPiece(0, len(system), 0, 0, 0, None))
    for chunk, (start, length) in enumerate(zip(composition.starts, composition.chunks, strict=True)):
        number = number_of(ChunkPrompt.of(seen, token_ids[start : start + length], block_size))
        distance = composition.position_at(start) - len(seen)
        pieces.append(PromptPiece(start, start + length, number, len(seen), distance, chunk))
    return tuple(numbers), tuple(pieces)


def first_private_block(composition: Composition, block_size: int) -> int:
    """The first block whose keys and values differ from those of an ordinary prompt with the same tokens.

    The system text and the first chunk, directly after it, are what an ordinary prompt would compute: their full
    blocks are shared with it.
    """
    exact = composition.system
    if composition.chunk_context == "system":
        exact += composition.chunks[0]
    return exact // block_size


def repaired_runs(composition: Composition, num_cached: int) -> tuple[tuple[int, int], ...]:
    """Recomputed runs, as (start, stop): the first tokens of each chunk, unless they are cached already.

    The first chunk is omitted if it saw the system text: it has seen everything before it.
    """
    runs = []
    for chunk, start in enumerate(composition.starts):
        stop = start + composition.repaired(chunk)
        if max(start, num_cached) < stop:
            runs.append((max(start, num_cached), stop))
    return tuple(runs)
