"""Pieces of chunk prompts that make up a composed prompt. No torch, no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvmosaic.layout import Layout, exact_spans, repair_positions
from kvmosaic.vllm.contract import Repair

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
    is_text: bool = False
    """Whether it computes the changing rest of a system text, which is worth nothing in tiers, instead of a chunk."""

    @classmethod
    def of(cls, seen: Sequence[int], chunk: Sequence[int], block_size: int, *, is_text: bool = False) -> ChunkPrompt:
        """The chunk prompt of a chunk that saw `seen`."""
        num_tokens = len(seen) + len(chunk)
        padding = -num_tokens % block_size
        return cls((*seen, *chunk, *(PADDING_TOKEN,) * padding), num_tokens, len(seen), is_text)


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
    span: int
    """Index of its span in the layout."""


def take_apart(
    layout: Layout, block_size: int, repair: Repair = 0
) -> tuple[tuple[ChunkPrompt, ...], tuple[PromptPiece, ...]]:
    """Splits a composed prompt into chunk prompts and pieces; what they do not cover is recomputed, or the question.

    Chunks of the same tokens share one chunk prompt, and one that is repaired as a whole needs none. The changing rest
    of a system text has a prompt, too. The system text comes from the first of these prompts that saw it, and has its
    own prompt if none did.
    """
    spans, positions = layout.spans, layout.positions()
    # in shared positions, repaired tokens are moved to where the question sees them, as parts of their piece
    repaired = {} if layout.rules.overlaps else repaired_runs(layout, repair)
    sources = [
        index
        for index, span in enumerate(spans[:-1])
        if not has_seen_chunks(layout, index) and span.num_in_prompt > sum(map(len, repaired.get(index, ())))
    ]
    has_shared_system = spans[0].segment.kind == "system" and any(spans[index].views for index in sources)
    numbers: dict[ChunkPrompt, int] = {}
    pieces = [PromptPiece(0, spans[0].num_tokens, 0, 0, 0, 0)] if has_shared_system else []
    starts = tuple(accumulate((span.num_in_prompt for span in spans), initial=0))
    for index in sources[has_shared_system:]:
        span = spans[index]
        seen = [token for view in span.views for token in spans[view.span].token_ids]
        prompt = ChunkPrompt.of(seen, span.token_ids, block_size, is_text=span.is_text)
        number = numbers.setdefault(prompt, len(numbers))
        distance = positions[index] - span.start
        pieces.append(PromptPiece(starts[index], starts[index + 1], number, len(seen), distance, index))
    return tuple(numbers), tuple(pieces)


def has_seen_chunks(layout: Layout, index: int) -> bool:
    """Whether a span is a text after chunks: no other prompt computes it, so it is recomputed like repaired tokens."""
    return any(layout.spans[view.span].is_chunk for view in layout.spans[index].views)


def first_private_block(layout: Layout, block_size: int) -> int:
    """The first block whose keys and values differ from those of an ordinary prompt with the same tokens.

    The system text and the text or chunk directly after it are what an ordinary prompt would compute: their full blocks
    are shared with it.
    """
    return sum(layout.spans[index].num_tokens for index in exact_spans(layout)) // block_size


def repaired_runs(layout: Layout, repair: Repair) -> dict[int, tuple[range, ...]]:
    """By index of a chunk's span: which of its tokens are recomputed; none if it saw everything before it."""
    exact = exact_spans(layout) if repair else set()
    chunks = [index for index, span in enumerate(layout.spans) if span.is_chunk]
    if isinstance(repair, int):
        repair = tuple((0, min(repair, layout.spans[index].num_tokens)) for index in chunks)
    runs = (tuple(filter(len, map(range, bounds[::2], bounds[1::2]))) for bounds in repair)
    return {index: each for index, each in zip(chunks, runs, strict=True) if each and index not in exact}


def recomputed_runs(layout: Layout, repair: Repair, num_cached: int) -> tuple[tuple[int, int, int], ...]:
    """Recomputed runs, as (start, stop, position): texts after chunks, and repaired tokens of each chunk.

    Tokens that are cached already are omitted. Repaired tokens are where `repair_positions` has them.
    """
    runs, begin = [], 0
    repaired, positions = repaired_runs(layout, repair), repair_positions(layout) if repair else layout.positions()
    for index, span in enumerate(layout.spans[:-1]):
        whole = (range(span.num_tokens),) if has_seen_chunks(layout, index) else ()
        for run in repaired.get(index, whole):
            start, stop = max(begin + run.start, num_cached), begin + run.stop
            if start < stop:
                runs.append((start, stop, positions[index] + start - begin))
        begin += span.num_in_prompt
    return tuple(runs)
